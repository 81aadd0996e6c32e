"""Deletions on a real cluster whose slots move."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.keys import bucket_key, key_slot
from bagpipe.store.redis.store import RedisStore
from bagpipe.testing.fence_jobs import take_over
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.nodes import ClusterNode, ClusterNodes, await_true

pytestmark = [pytest.mark.alone, pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=4),), optimizer="sgd")
IDS = np.arange(400, dtype=np.int64)
ROWS = np.arange(1600, dtype=np.float32).reshape(400, 4)
NEW = np.zeros(400, np.uint64)


@pytest.fixture
def moving(redis_cluster: ClusterNodes, namespace: str) -> Iterator[tuple[int, ClusterNode, ClusterNode]]:
    """Slot of bucket 3, its master, and another one; afterwards it is back."""
    slot = key_slot(bucket_key(namespace, 3))
    source = redis_cluster.owner_of(slot)
    target = next(node for node in redis_cluster.masters if node is not source)
    yield slot, source, target
    redis_cluster.move(slot, target, source)


def opened(nodes: ClusterNodes, namespace: str) -> RedisStore:
    return RedisStore(nodes.url, schema=SCHEMA, namespace=namespace, num_buckets=16)


def test_redirections_of_an_unfenced_deletion(
    redis_cluster: ClusterNodes, namespace: str, moving: tuple[int, ClusterNode, ClusterNode]
) -> None:
    """ASK for a bucket that has moved, then MOVED: once to read the check words, and once to delete at most."""
    nodes, (slot, source, target) = redis_cluster, moving
    with opened(nodes, namespace) as store:
        store.write_many([WriteRequest(0, IDS, ROWS, NEW)])
        nodes.begin_move(slot, source, target)
        store.delete_many([DeleteRequest(0, IDS[:100])])
        assert store.statistics().asked == 0, "the bucket is still there"
        nodes.move_keys(slot, source, target)
        store.delete_many([DeleteRequest(0, IDS[:200])])
        assert store.statistics().asked == 2
        nodes.end_move(slot, target)
        store.delete_many([DeleteRequest(0, IDS[:300])])
        assert store.statistics().moved == 1, "the writer knows the new master after reading"
        assert (store.ids(0) == IDS[300:]).all()
        assert store.sum_changes().to_list() == stored_sums(store).to_list()


def test_a_fenced_deletion_waits_for_a_slot_on_the_move(
    redis_cluster: ClusterNodes, namespace: str, moving: tuple[int, ClusterNode, ClusterNode]
) -> None:
    """Bucket and log are two keys; no deletion is split between two nodes."""
    nodes, (slot, source, target) = redis_cluster, moving
    with opened(nodes, namespace) as store:
        take_over(store)
        store.write_many([WriteRequest(0, IDS, ROWS, NEW)])
        nodes.begin_move(slot, source, target)
        refused = source.num_errors("TRYAGAIN")
        deleter = threading.Thread(target=store.delete_many, args=([DeleteRequest(0, IDS[:390])],))
        deleter.start()
        await_true(lambda: source.num_errors("TRYAGAIN") > refused, "the refusal")
        nodes.move_keys(slot, source, target)
        nodes.end_move(slot, target)
        deleter.join()
        assert (store.ids(0) == IDS[390:]).all()
        assert store.sum_changes().to_list() == stored_sums(store).to_list()
        assert (store.rotate() == 2).all()


def test_a_connection_that_is_cut_is_made_again(redis_cluster: ClusterNodes, namespace: str) -> None:
    with opened(redis_cluster, namespace) as store:
        take_over(store)
        store.write_many([WriteRequest(0, IDS, ROWS, NEW)])
        for node in redis_cluster.masters:
            node.client.client_kill_filter(_type="normal", skipme=True)
        store.delete_many([DeleteRequest(0, IDS)])
        assert len(store.ids(0)) == 0
        assert store.sum_changes().to_list() == [0] * 16
        assert (store.rotate() == 2).all()
