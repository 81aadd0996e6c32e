from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from bagpipe.config.sections import Durability
from bagpipe.errors import InputError, StoreError
from bagpipe.store.open import open_store
from bagpipe.store.redis.durability import DURABILITIES, inspect_durability, refuse_less_durable, server_options
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")
SERVERS: dict[str, tuple[int, str]] = {
    "nothing": (0, "always"),
    "no": (1, "no"),
    "everysec": (1, "everysec"),
    "always": (1, "always"),
}


def test_the_configuration_knows_the_same_words() -> None:
    assert get_args(Durability) == DURABILITIES


@pytest.mark.parametrize(
    ("durability", "enough"),
    [("memory", set(SERVERS)), ("everysec", {"everysec", "always"}), ("always", {"always"})],
)
@pytest.mark.parametrize("server", SERVERS)
def test_which_servers_are_good_enough(durability: str, enough: set[str], server: str) -> None:
    aof_enabled, appendfsync = SERVERS[server]
    if server in enough:
        refuse_less_durable("there", {"aof_enabled": aof_enabled}, appendfsync, durability)
        return
    said = f"appendfsync {appendfsync}" if aof_enabled else "appendonly is no"
    with pytest.raises(InputError, match=rf"store there .*{said}.* store\.durability is {durability}; run CONFIG SET"):
        refuse_less_durable("there", {"aof_enabled": aof_enabled}, appendfsync, durability)


@pytest.mark.parametrize(
    ("info", "durability", "said"),
    [
        ({"aof_enabled": 0}, "memory", None),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "memory", None),
        ({"aof_enabled": 1, "aof_last_write_status": "ok"}, "always", None),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "everysec", "there cannot write .* err, expected ok"),
        ({"aof_enabled": 1, "appendfsync": "always"}, "everysec", None),
        ({"aof_enabled": 1, "appendfsync": "everysec"}, "always", "there: appendfsync is everysec by now"),
        ({"aof_enabled": 1, "appendfsync": "no"}, "everysec", "there: appendfsync is no by now, but store.durability"),
        ({"aof_enabled": 0}, "always", "there: appendonly is no by now, but store.durability is always"),
    ],
)
def test_what_a_server_says_later(info: dict[str, object], durability: str, said: str | None) -> None:
    if said is None:
        inspect_durability("there", info, durability)
        return
    with pytest.raises(StoreError, match=said):
        inspect_durability("there", info, durability)


def enter(url: str, durability: str) -> None:
    with open_store(url, namespace="job", schema=SCHEMA, durability=durability) as store:
        store.check()


@pytest.mark.redis
@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_real_server_of_each_kind(tmp_path: Path, durability: str) -> None:
    with EmbeddedServer(tmp_path, durability=durability) as server, client_of(server.url) as client:
        options = server_options(durability)
        assert client.info("persistence")["aof_enabled"] == (options["appendonly"] == "yes")
        for asked in DURABILITIES:
            if DURABILITIES.index(asked) <= DURABILITIES.index(durability):
                enter(server.url, asked)
            else:
                with pytest.raises(InputError, match=rf"store unix:.*store.durability is {asked}; run CONFIG SET"):
                    enter(server.url, asked)


@pytest.mark.redis
def test_every_master_of_a_cluster(redis_cluster: ClusterNodes) -> None:
    enter(redis_cluster.url, "memory")
    with pytest.raises(InputError, match="keeps rows in memory only"):
        enter(redis_cluster.url, "always")
    first, *others = redis_cluster.masters
    try:
        for node in others:
            node.client.config_set("appendonly", "yes")
        with pytest.raises(InputError, match=f"store redis.cluster://127.0.0.1:{first.port} keeps rows in memory"):
            enter(redis_cluster.url, "everysec")
        first.client.config_set("appendonly", "yes")
        enter(redis_cluster.url, "everysec")
    finally:
        for node in redis_cluster.masters:
            node.client.config_set("appendonly", "no")


@pytest.mark.redis
@pytest.mark.parametrize("change", ["-config|get", "-config"])
def test_a_server_that_does_not_tell(tmp_path: Path, change: str) -> None:
    with EmbeddedServer(tmp_path, durability="always") as server, client_of(server.url) as client:
        client.execute_command("ACL", "SETUSER", "default", change)
        enter(server.url, "memory")
        with pytest.raises(
            InputError, match=r"does not tell its appendfsync.*grant the user \+config\|get, or set"
        ) as caught:
            enter(server.url, "always")
        assert "\n" not in str(caught.value)


def test_memory_is_not_durable() -> None:
    enter("memory://", "memory")
    with pytest.raises(InputError, match=r"store\.durability is always, but memory:// keeps rows in this process"):
        enter("memory://", "always")
