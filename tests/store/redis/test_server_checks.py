"""Rights, eviction and durability before a job, and changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import redis

from bagpipe.config.sections import Durability
from bagpipe.errors import InputError, StoreError
from bagpipe.store.open import open_store
from bagpipe.store.redis.server_checks import (
    DURABILITIES,
    REQUIRED_COMMANDS,
    ServerMonitor,
    check_durability,
    check_eviction,
    check_rights,
    check_still_durable,
    denied_commands,
)
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes

pytestmark = pytest.mark.usefixtures("no_leaks")

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")
SERVERS: dict[str, tuple[int, str]] = {
    "nothing": (0, "always"),
    "no": (1, "no"),
    "everysec": (1, "everysec"),
    "always": (1, "always"),
}
HEALTHY: dict[str, object] = {
    "run_id": "a1",
    "role": "master",
    "evicted_keys": 3,
    "expired_keys": 5,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
}


# ACL rights


@pytest.fixture
def client(tmp_path: Path) -> Iterator[redis.Redis]:
    with EmbeddedServer(tmp_path) as server, client_of(server.url) as client:
        yield client


def asked(client: redis.Redis, *rules: str) -> list[bytes]:
    """Required commands that a user with these rules and EVAL is denied."""
    client.execute_command("ACL", "SETUSER", "trainer", "reset", "on", "nopass", "+eval", *rules)
    client.execute_command("AUTH", "trainer", "x")
    return list(client.execute_command(*denied_commands(b"job:{0}").words))


@pytest.mark.redis
def test_a_user_with_all_rights(client: redis.Redis) -> None:
    assert asked(client, "~job:*", "+@all") == []
    assert asked(client, "~job:*", *(f"+{name}" for name in REQUIRED_COMMANDS), "+acl", "+auth") == []


@pytest.mark.redis
@pytest.mark.parametrize("command", sorted(set(REQUIRED_COMMANDS) - {"eval"}))
def test_each_command_is_asked_for(client: redis.Redis, command: str) -> None:
    assert asked(client, "~job:*", "+@all", f"-{command}") == [command.encode()]


@pytest.mark.redis
def test_keys_are_asked_for_too(client: redis.Redis) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        asked(client, "~other:*", "+@all")


def test_the_refusal_names_all() -> None:
    check_rights("there", [])
    with pytest.raises(
        InputError, match=r"store there: the user may not run commands .*: 'hset', 'set'; see docs/store.md"
    ):
        check_rights("there", [b"hset", b"set"])


# Eviction


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"maxmemory": 0}, "INFO does not tell maxmemory_policy"),
        (
            {"maxmemory": 10, "maxmemory_policy": "allkeys-lru"},
            "there drops rows when full: maxmemory 10 .* allkeys-lru",
        ),
    ],
)
def test_a_server_that_may_drop_rows(info: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_eviction("there", info)


def test_a_server_that_keeps_rows() -> None:
    check_eviction("there", {"maxmemory": 10, "maxmemory_policy": "noeviction"})
    check_eviction("there", {"maxmemory": 0, "maxmemory_policy": "allkeys-lru"})


# Durability


def test_the_configuration_has_the_same_values() -> None:
    assert get_args(Durability) == DURABILITIES


@pytest.mark.parametrize(
    ("durability", "enough"),
    [("memory", set(SERVERS)), ("everysec", {"everysec", "always"}), ("always", {"always"})],
)
@pytest.mark.parametrize("server", SERVERS)
def test_which_servers_are_good_enough(durability: str, enough: set[str], server: str) -> None:
    aof_enabled, appendfsync = SERVERS[server]
    if server in enough:
        check_durability("there", {"aof_enabled": aof_enabled}, appendfsync, durability)
        return
    said = f"appendfsync {appendfsync}" if aof_enabled else "appendonly is no"
    with pytest.raises(InputError, match=rf"store there .*{said}.* store\.durability is {durability}; run CONFIG SET"):
        check_durability("there", {"aof_enabled": aof_enabled}, appendfsync, durability)


@pytest.mark.parametrize(
    ("info", "durability", "said"),
    [
        ({"aof_enabled": 0}, "memory", None),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "memory", None),
        ({"aof_enabled": 1, "aof_last_write_status": "ok"}, "always", None),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "everysec", "there cannot write .* err, expected ok"),
        ({"aof_enabled": 1, "appendfsync": "always"}, "everysec", None),
        ({"aof_enabled": 1, "appendfsync": "everysec"}, "always", "there: appendfsync is now everysec"),
        ({"aof_enabled": 1, "appendfsync": "no"}, "everysec", "there: appendfsync is now no, but store.durability"),
        ({"aof_enabled": 0}, "always", "there: appendonly is now no, but store.durability is always"),
    ],
)
def test_later_answers_of_a_server(info: dict[str, object], durability: str, said: str | None) -> None:
    if said is None:
        check_still_durable("there", info, durability)
        return
    with pytest.raises(StoreError, match=said):
        check_still_durable("there", info, durability)


def enter(url: str, durability: str) -> None:
    with open_store(url, namespace="job", schema=SCHEMA, durability=durability) as store:
        store.check()


@pytest.mark.redis
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_real_server_of_each_kind(tmp_path: Path, durability: str) -> None:
    with EmbeddedServer(tmp_path, durability=durability) as server, client_of(server.url) as client:
        assert client.info("persistence")["aof_enabled"] == (durability != "memory")
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
def test_a_server_that_hides_its_configuration(tmp_path: Path, change: str) -> None:
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


# Changes while a job runs


def checked(*, durability: str = "always", **changes: object) -> bool:
    monitor = ServerMonitor([("there", HEALTHY), ("elsewhere", HEALTHY)], durability)
    return monitor.check([("there", HEALTHY | changes), ("elsewhere", HEALTHY)])


def test_an_unchanged_server_passes() -> None:
    assert checked() is False


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run_id": "b2"}, "started again while the job ran: run_id was a1, is b2"),
        ({"role": "slave"}, "changed its role from master to slave"),
        ({"evicted_keys": 4}, "has evicted keys: evicted_keys was 3, is 4"),
        ({"maxmemory": 10, "maxmemory_policy": "allkeys-lru"}, "drops rows when full"),
        ({"aof_last_write_status": "err"}, "cannot write its append-only file"),
        ({"aof_enabled": 0}, "appendonly is now no"),
    ],
)
def test_forbidden_changes_are_detected(changes: dict[str, object], said: str) -> None:
    with pytest.raises(StoreError, match=f"store there:? .*{said}|store there: {said}") as caught:
        checked(**changes)
    assert "\n" not in str(caught.value)


def test_persistence_matters_only_if_asked_for() -> None:
    assert checked(durability="memory", aof_enabled=0, aof_last_write_status="err") is False


def test_statistics_may_be_reset() -> None:
    monitor = ServerMonitor([("there", HEALTHY)], "memory")
    monitor.check([("there", HEALTHY | {"evicted_keys": 0, "expired_keys": 0})])
    with pytest.raises(StoreError, match="evicted_keys was 0, is 2"):
        monitor.check([("there", HEALTHY | {"evicted_keys": 2})])


def test_expired_keys_are_reported_once() -> None:
    monitor = ServerMonitor([("there", HEALTHY)], "memory")
    later = [("there", HEALTHY | {"expired_keys": 6})]
    assert [monitor.check(later), monitor.check(later)] == [True, False]


def test_nodes_of_a_cluster_come_and_go() -> None:
    monitor = ServerMonitor([("one", HEALTHY), ("two", HEALTHY)], "memory")
    assert monitor.check([("one", HEALTHY), ("three", HEALTHY | {"run_id": "c3"})]) is False
    assert monitor.check([("one", HEALTHY), ("two", HEALTHY | {"run_id": "d4"})]) is False
    with pytest.raises(StoreError, match="store two was started again"):
        monitor.check([("two", HEALTHY)])
