"""Reads of which some commands are redirected, on a real cluster."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.keys import bucket_key, key_slot
from bagpipe.store.redis.store import RedisStore
from bagpipe.types.schema import RowSchema, RowTable
from tests.store.nodes import ClusterNodes

pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("no_leaks")]

SCHEMA = RowSchema(tables=(RowTable(name="user", dim=16),), optimizer="sgd")
NUM_BUCKETS = 16
IDS = np.arange(400, dtype=np.int64)
ROWS = np.arange(400 * 16, dtype=np.float32).reshape(400, 16)


def test_several_slots_that_move_at_once(redis_cluster: ClusterNodes, namespace: str) -> None:
    """Replies of one node, between whose rows some commands are redirected; then ASKING before each of several."""
    nodes, slots = redis_cluster, [key_slot(bucket_key(namespace, bucket)) for bucket in range(NUM_BUCKETS)]
    source = nodes.owner_of(slots[0])
    target = next(node for node in nodes.masters if node is not source)
    moving = sorted({slot for slot in slots if nodes.owner_of(slot) is source})[::2]
    with RedisStore(nodes.url, schema=SCHEMA, namespace=namespace, num_buckets=NUM_BUCKETS) as store:
        store.write(0, IDS[:300], ROWS[:300])
        try:
            for slot in moving:
                nodes.begin_move(slot, source, target)
                nodes.move_keys(slot, source, target)
            result = store.read(0, IDS)
            assert store.statistics().asked == len(moving)
            assert result.found.tolist() == (IDS < 300).tolist()
            assert (result.rows[:300] == ROWS[:300]).all()
            store.write(0, IDS, -ROWS)
            assert (store.read(0, IDS).rows == -ROWS).all()
        finally:
            for slot in moving:  # back, without a change of owners, which would take the nodes a while to agree on
                source.cluster("SETSLOT", slot, "STABLE")
                nodes.move_keys(slot, target, source)
                target.cluster("SETSLOT", slot, "STABLE")
        assert (store.read(0, IDS).rows == -ROWS).all()
