from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.keys import bucket_of
from bagpipe.store.redis.routing import Router, servers_of_buckets


@given(
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)), max_size=4),
    st.sampled_from([1, 2, 8, 64]).flatmap(
        lambda num_buckets: st.lists(st.integers(0, 3), min_size=num_buckets, max_size=num_buckets)
    ),
    st.integers(1, 7),
)
def test_every_row_is_sent_once_to_the_server_of_its_bucket(
    requests: list[tuple[int, list[int]]], server_of: list[int], max_rows: int
) -> None:
    """Any assignment of buckets to servers; a server may have no bucket."""
    servers, num_buckets = np.array(server_of, np.intp), len(server_of)
    router = Router(servers)
    tables = np.array([table for table, ids in requests for _ in ids], np.uint32)
    ids = np.array([row_id for _, ids in requests for row_id in ids], np.int64)
    routed = router.route([(table, np.array(ids, np.int64)) for table, ids in requests])
    assert sorted(routed.order.tolist()) == list(range(len(ids)))
    assert (routed.tables == tables).all()
    assert (routed.ids == ids).all()
    buckets = bucket_of(tables, ids, num_buckets)[routed.order]
    next_row = 0
    for server in range(max(server_of) + 1):
        for command in router.commands(routed, server, max_rows=max_rows):
            assert command.start == next_row, "commands leave no gap, so a run of them is one slice"
            assert 0 < command.stop - command.start <= max_rows
            assert (buckets[command.start : command.stop] == command.bucket).all()
            assert server_of[command.bucket] == server
            next_row = command.stop
    assert next_row == len(ids)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_equal_ids_keep_their_order(num_servers: int) -> None:
    ids = np.array([5, 9, 5, 5], np.int64)
    routed = Router(servers_of_buckets(16, num_servers)).route([(0, ids), (0, ids)])
    positions = routed.order[routed.ids[routed.order] == 5]
    assert positions.tolist() == [0, 2, 3, 4, 6, 7]


def test_servers_of_a_list_take_buckets_in_turn() -> None:
    """Part of the stored format."""
    assert servers_of_buckets(8, 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
