"""Commands on single keys of a cluster, and clusters that are refused when a store opens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.store.keys import key_slot, meta_key
from bagpipe.store.redis.cluster import Cluster
from bagpipe.store.redis.reply_forms import COUNT
from bagpipe.store.redis.servers import KeyCommand, Unreachable
from bagpipe.store.redis.store import RedisStore
from bagpipe.store.redis.urls import parse_cluster_url
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.clients import client_of
from tests.store.nodes import ClusterNode, ClusterNodes, await_true, start_server

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=4),), optimizer="sgd")


def cluster_of(url: str) -> Cluster:
    return Cluster(seeds=parse_cluster_url(url))


def exists(key: bytes) -> KeyCommand:
    return KeyCommand(key, ("EXISTS", key), COUNT)


def refused(url: str, *words: str, namespace: str = "job", timeout_s: float = 30.0) -> None:
    """Assert that entering, checking or claiming fails with a one-line message."""
    with pytest.raises(InputError) as caught:  # noqa: PT012  # whichever of the three refuses
        with RedisStore(url, schema=SCHEMA, namespace=namespace, timeout_s=timeout_s) as store:
            store.check()
            store.claim()
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


@contextmanager
def without_slot(nodes: ClusterNodes, slot: int) -> Iterator[ClusterNode]:
    """Make the master of a slot stop serving it. Yields the master."""
    owner = nodes.owner_of(slot)
    owner.cluster("DELSLOTS", slot)
    try:
        yield owner
    finally:
        owner.cluster("ADDSLOTS", slot)
        await_true(lambda: all(node.info()["cluster_state"] == "ok" for node in nodes.nodes), "the cluster")


def test_one_node_knows_the_others(redis_cluster: ClusterNodes) -> None:
    node = redis_cluster.masters[2]
    topology = cluster_of(f"redis+cluster://127.0.0.1:{node.port}").whole_topology(10.0)
    assert {master.port for master in topology.masters} == {node.port for node in redis_cluster.masters}
    assert topology.master_of(0) == ("127.0.0.1", redis_cluster.owner_of(0).port)


def test_the_next_node_is_asked_if_the_first_is_gone(redis_cluster: ClusterNodes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        gone = free.getsockname()[1]
    url = f"redis+cluster://127.0.0.1:{gone},127.0.0.1:{redis_cluster.masters[0].port}"
    assert len(cluster_of(url).whole_topology(10.0).masters) == 3
    with pytest.raises(Unreachable, match=f"store redis.cluster://127.0.0.1:{gone}: cannot be reached"):
        cluster_of(f"redis+cluster://127.0.0.1:{gone}").topology(10.0)


def test_a_node_that_knows_no_master_is_no_answer(redis_cluster: ClusterNodes, tmp_path: Path) -> None:
    """A node that was reset or is just joining; the next seed is asked."""
    with ExitStack() as stack:
        _, (port, _), _ = start_server(stack, tmp_path / "new", ("port", "cluster-port"), {"cluster-enabled": "yes"})
        url = f"redis+cluster://127.0.0.1:{port}"
        with pytest.raises(Unreachable, match="knows of no node that serves any slot"):
            cluster_of(url).topology(10.0)
        assert len(cluster_of(f"{url},127.0.0.1:{redis_cluster.masters[0].port}").topology(10.0).masters) == 3


def test_a_server_on_its_own_and_a_node_of_a_cluster(redis_cluster: ClusterNodes, tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, (port,), _ = start_server(stack, tmp_path / "single", ("port",), {})
        refused(f"redis+cluster://127.0.0.1:{port}", "is a server on its own", "use redis:// instead")
    refused(f"redis://127.0.0.1:{redis_cluster.masters[0].port}", "is a node of a cluster", "use redis+cluster://")


def test_a_cluster_with_a_gap(redis_cluster: ClusterNodes) -> None:
    with without_slot(redis_cluster, 77) as owner:
        refused(f"redis+cluster://127.0.0.1:{owner.port}", "the cluster serves 16383 of 16384 slots")


@pytest.mark.parametrize("number", range(3))
def test_every_master_must_keep_its_rows(redis_cluster: ClusterNodes, number: int) -> None:
    node = redis_cluster.masters[number]
    node.client.config_set("maxmemory", "100mb")
    node.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        refused(redis_cluster.url, node.endpoint, "104857600", "allkeys-lru", "noeviction")
    finally:
        node.client.config_set("maxmemory-policy", "noeviction")
        node.client.config_set("maxmemory", "0")


def test_a_key_that_moves_is_followed(redis_cluster: ClusterNodes, namespace: str) -> None:
    nodes, key = redis_cluster, meta_key(namespace)
    slot = key_slot(key)
    source = nodes.owner_of(slot)
    target = next(node for node in nodes.masters if node is not source)
    with cluster_of(nodes.url).session(10.0) as session:
        assert session.run(key, lambda client: client.hset(key, "field", "here")) == 1
        try:
            nodes.begin_move(slot, source, target)
            assert session.run(key, lambda client: client.hgetall(key)) == {b"field": b"here"}
            assert nodes.move_keys(slot, source, target) == 1
            assert session.run(key, lambda client: client.hgetall(key)) == {b"field": b"here"}
            assert session.run_all([exists(key)]) == [1]
            nodes.end_move(slot, target)
            assert session.run_all([exists(key)]) == [1]
            assert session.run(key, lambda client: client.hgetall(key)) == {b"field": b"here"}
            assert session.run(key, lambda client: client.delete(key)) == 1
            assert session.run_all([exists(key), exists(meta_key("other" + namespace))]) == [0, 0]
        finally:
            nodes.move(slot, target, source)


def test_a_key_that_no_node_serves(redis_cluster: ClusterNodes, namespace: str) -> None:
    key = meta_key(namespace)
    with cluster_of(redis_cluster.url).session(0.3) as session:
        with without_slot(redis_cluster, key_slot(key)):
            with pytest.raises(InputError, match=rf"no answer about {key.decode()} within store\.timeout_s = 0\.3 s"):
                session.run(key, lambda client: client.hgetall(key))


def test_a_namespace_moves_between_a_server_and_a_cluster(
    redis_cluster: ClusterNodes, redis_server: EmbeddedServer, namespace: str
) -> None:
    """A cluster has the same schema record as a single server."""
    with RedisStore(redis_cluster.url, schema=SCHEMA, namespace=namespace) as store:
        assert store.claim()
        assert store.check()
    key = meta_key(namespace)
    record = redis_cluster.owner_of(key_slot(key)).client.hgetall(key)
    with RedisStore(redis_server.url, schema=SCHEMA, namespace=namespace) as store:
        assert store.claim()
    with client_of(redis_server.url) as client:
        assert client.hgetall(key) == record
