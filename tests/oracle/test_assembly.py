from __future__ import annotations

import numpy as np

from bagpipe.oracle.assembly import GlobalRows, assemble, positions_by_rank, select_rows
from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.plan import NO_BATCH, OwnerPlan, RowList
from bagpipe.oracle.rank_index import RankIndex

ROWS = RowList(table_offsets=np.array([0, 2, 2, 4]), ids=np.array([10, 20, 30, 40]))


OWNERS = tuple(
    OwnerPlan(
        fetch=ROWS,
        fetch_slots=np.arange(4, dtype=np.int32),
        fetch_new=np.ones(4, dtype=np.bool_),
        evict=ROWS,
        evict_slots=np.arange(4, dtype=np.int32),
        evict_after=evict_after,
        evict_waiting=0,
        fetch_after=NO_BATCH,
        num_slots=4,
    )
    for evict_after in (NO_BATCH, 2)
)


def rank_index_of(rows: list[int]) -> RankIndex:
    """The index of a rank that uses each of these unique rows once."""
    numbers = np.arange(len(rows), dtype=np.int32)
    return RankIndex(
        examples=numbers[:1],
        rows=np.array(rows, dtype=np.int32),
        offsets=np.arange(len(rows) + 1, dtype=np.int32),
        order=numbers,
    )


def test_selected_rows_stay_grouped_by_table() -> None:
    some = select_rows(ROWS, np.array([1, 3]))
    assert (some.table_offsets.tolist(), some.ids.tolist()) == ([0, 1, 1, 2], [20, 40])
    assert select_rows(ROWS, np.array([], dtype=np.int32)).table_offsets.tolist() == [0, 0, 0, 0]


def test_positions_by_rank_are_ascending() -> None:
    ranks = np.array([2, 0, 2, 2, 0], dtype=np.uint16)
    assert [part.tolist() for part in positions_by_rank(ranks, 4)] == [[1, 4], [], [0, 2, 3], []]


def test_both_sides_list_shared_rows_in_the_consumers_order() -> None:
    owners = np.array([1, 0, 1, 1], dtype=np.uint16)
    rows = GlobalRows(
        owners=owners,
        slots=np.array([5, 6, 7, 8], dtype=np.int32),
        push_now=np.array([True, False, True, False]),
        pull_now=np.array([False, False, True, True]),
        owned=positions_by_rank(owners, 2),
    )
    rank_indexes = (rank_index_of([0, 1, 3]), rank_index_of([2, 3]))
    plan = assemble(IndexedBatch(batch_index=4, unique=ROWS, whole=None, rank_indexes=rank_indexes), rows, OWNERS)
    first, second = plan.consumers
    assert (first.unique.ids.tolist(), first.owners.tolist(), first.slots.tolist()) == (
        [10, 20, 40],
        [1, 0, 1],
        [5, 6, 8],
    )
    assert second.push_now.tolist() == [True, False]
    assert plan.exchanges[0].pull_now.tolist() == [False, False, True]
    owner = plan.exchanges[1]
    assert (owner.owned.ids.tolist(), owner.owned_slots.tolist()) == ([10, 30, 40], [5, 7, 8])
    assert (owner.owned_pull_now.tolist(), owner.owned_push_now.tolist()) == ([False, True, True], [True, True, False])
    assert (owner.serve_offsets.tolist(), owner.serve_rows.tolist()) == ([0, 2, 4], [0, 2, 1, 2])
    assert [exchange.ready_after for exchange in plan.exchanges] == [2, 2]
    assert [examples.tolist() for examples in plan.examples] == [[0], [0]]
