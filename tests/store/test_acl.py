"""The ACL user of docs/store.md: its rights suffice for a job, and each one is needed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from bagpipe.errors import InputError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest
from bagpipe.store.keys import bucket_key, bucket_of, key_slot
from bagpipe.store.redis.server_checks import REQUIRED_COMMANDS
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNodes

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=4),), optimizer="sgd")
IDS = np.arange(100, dtype=np.int64)
ROWS = np.arange(400, dtype=np.float32).reshape(100, 4)
DOCUMENT = Path(__file__).parents[2] / "docs" / "store.md"


#: Rights that these tests do not exercise; see the first test.
_NOT_MISSED = {"hkeys", "select"}


def documented(number: int) -> list[str]:
    """Words of the ACL SETUSER line in docs/store.md for a server (0) or a cluster (1)."""
    lines = re.findall(r"^ACL SETUSER trainer (.*)$", DOCUMENT.read_text(), re.MULTILINE)
    return str(lines[number]).split()


def set_user(client: redis.Redis, rules: list[str], *changes: str) -> None:
    words = [">secret" if rule.startswith(">") else rule for rule in rules]
    client.execute_command("ACL", "SETUSER", "trainer", "reset", *words, *changes)


def denials(client: redis.Redis) -> list[object]:
    """Denied commands, except those of redis-py's handshake."""
    return [entry for entry in client.acl_log() if entry["object"] != "client|setinfo"]


def commands_of(rules: list[str]) -> set[str]:
    return {rule.removeprefix("+") for rule in rules if rule.startswith("+")}


def run_a_job(url: str, namespace: str = "bagpipe") -> None:
    """All store calls of a job, twice: recovery, rows, checkpoints, inspection, loss of the namespace."""
    for generation in range(2):
        with RedisStore(url, schema=SCHEMA, namespace=namespace) as store:
            store.check()
            store.claim()
            with store.ledger() as ledger:
                play(store, ledger, f"{generation}-{uuid.uuid4().hex}")


def play(store: RedisStore, ledger: Ledger, token: str) -> None:
    ledger.state()
    ledger.acquire(token)
    for bucket in range(ledger.num_buckets):
        ledger.touched(bucket)
    ledger.drop(0)
    ledger.delete(np.zeros(len(IDS), np.uint32), IDS)
    store.fence(Fence(token=token, writer=0, epoch=0))
    store.write(0, IDS, ROWS)
    ledger.begin("m:0", 1, num_groups=store.rotate().tolist())
    store.fence(Fence(token=token, writer=0, epoch=1))
    assert (store.read(0, IDS).rows == ROWS).all()
    store.write(0, IDS, ROWS)
    num_groups = store.rotate().tolist()
    ledger.inspect()
    ledger.commit("m:1", 1, [num_groups])
    store.delete_many([DeleteRequest(0, IDS)])
    store.write(0, IDS, ROWS)
    assert (store.ids(0) == IDS).all()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path / "own") as server:
        yield server


def login(url: str, password: str = "secret", user: str = "trainer") -> str:
    return url.replace("://", f"://{user}:{password}@", 1)


def test_the_documented_user_has_exactly_the_needed_rights(own_server: EmbeddedServer) -> None:
    rules = documented(0)
    with client_of(own_server.url) as client:
        set_user(client, rules)
        client.config_resetstat()
        run_a_job(login(own_server.url))
        assert denials(client) == []
        called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
    ours = {"acl|log", "config|resetstat", "auth", "client|setinfo"}
    # HKEYS is for servers without HSCAN NOVALUES, SELECT for a URL with a database, UNWATCH for two jobs that claim
    # one namespace at the same time, RPOP for a group that was sent twice, PTTL for keys that expired.
    rare = {"hkeys", "select", "unwatch", "rpop", "pttl"}
    assert called - ours - {"hkeys"} == commands_of(rules) - rare
    assert commands_of(rules) == {*REQUIRED_COMMANDS, "hkeys", "select"}


def test_the_proposed_user_may_follow_a_cluster(redis_cluster: ClusterNodes, namespace: str) -> None:
    rules = [rule.replace("bagpipe", namespace) for rule in documented(1)]
    assert commands_of(rules) == commands_of(documented(0)) - {"select"} | {"asking", "cluster|slots"}
    bucket = int(bucket_of(np.zeros(1, np.uint32), IDS[:1], 64)[0])
    nodes, slot = redis_cluster, key_slot(bucket_key(namespace, bucket))
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    for node in nodes.masters:
        set_user(node.client, rules)
        node.client.acl_log_reset()
    try:
        run_a_job(login(nodes.url), namespace)
        nodes.begin_move(slot, source, target)
        nodes.move_keys(slot, source, target)
        with RedisStore(login(nodes.url), schema=SCHEMA, namespace=namespace) as store:
            assert (store.read(0, IDS).rows == ROWS).all()
            assert store.statistics().asked > 0
        nodes.end_move(slot, target)
        run_a_job(login(nodes.url), namespace)
        for node in nodes.masters:
            assert denials(node.client) == []
    finally:
        nodes.move_keys(slot, source, target)
        nodes.end_move(slot, target)
        nodes.move(slot, target, source)
        for node in nodes.masters:
            node.client.acl_deluser("trainer")


@pytest.mark.parametrize("command", sorted(commands_of(documented(0)) - _NOT_MISSED))
def test_a_command_that_is_denied(own_server: EmbeddedServer, command: str) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0), f"-{command}")
        with pytest.raises(InputError, match=f"the user may not run .*'{command}'") as caught:
            run_a_job(login(own_server.url))
        client.execute_command("ACL", "SETUSER", "trainer", f"+{command}")
        assert not client.exists("bagpipe:meta"), "something was written"
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_cluster_that_hides_its_nodes(redis_cluster: ClusterNodes, namespace: str) -> None:
    for node in redis_cluster.masters:
        set_user(node.client, [rule.replace("bagpipe", namespace) for rule in documented(1)], "-cluster|slots")
    try:
        with pytest.raises(InputError, match=r"may not run a command that is needed.*'cluster\|slots'") as caught:
            run_a_job(login(redis_cluster.url), namespace)
        assert "secret" not in str(caught.value)
    finally:
        for node in redis_cluster.masters:
            node.client.acl_deluser("trainer")


@pytest.mark.parametrize("neighbour", ["other", "bagpipe2", "bagpipe:eu", "bagpipe:meta", "bagpipe:", "bagpip"])
def test_another_namespace(own_server: EmbeddedServer, neighbour: str) -> None:
    """Also one whose name begins with this user's namespace."""
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
        with RedisStore(own_server.url, schema=SCHEMA, namespace=neighbour) as store:
            store.claim()
            store.write(0, IDS, ROWS)
        with pytest.raises(InputError, match=r"may not run a command that is needed: .*key"):
            run_a_job(login(own_server.url), neighbour)
        with client_of(login(own_server.url)) as user:
            for key in client.scan_iter():
                with pytest.raises(redis.exceptions.NoPermissionError):
                    user.exists(key)


def test_rights_taken_away_while_the_job_runs(own_server: EmbeddedServer) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
        with RedisStore(login(own_server.url), schema=SCHEMA) as store:
            store.write(0, IDS, ROWS)
            client.execute_command("ACL", "SETUSER", "trainer", "-hset")
            with pytest.raises(StoreError, match=r"NOPERM .*'hset'"):
                store.write(0, IDS, ROWS)


@pytest.mark.parametrize(
    ("user", "password"),
    [("trainer", "wr0ng"), ("nobody", "secret"), ("trainer", "")],
    ids=["wrong password", "no such user", "no password"],
)
def test_an_unknown_user(own_server: EmbeddedServer, redis_cluster: ClusterNodes, user: str, password: str) -> None:
    with client_of(own_server.url) as client:
        set_user(client, documented(0))
    for url in (own_server.url, redis_cluster.url):
        with pytest.raises(InputError, match="user or password refused, give both in the URL") as caught:
            run_a_job(login(url, password, user))
        message = str(caught.value)
        assert "\n" not in message
        assert not password or password not in message
