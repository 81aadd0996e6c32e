"""Lives of rows: limits by table, rows that last, and bounded memory. See test_expiry.py for the log's own count."""

from __future__ import annotations

import itertools

import numpy as np

from bagpipe.oracle.lifetimes import LEAST_GAP, RowLifetimes
from bagpipe.oracle.plan import RowList


def rows(*ids_of_tables: list[int]) -> RowList:
    offsets = np.cumsum([0, *map(len, ids_of_tables)])
    return RowList(table_offsets=offsets, ids=np.array([i for ids in ids_of_tables for i in ids], dtype=np.int64))


def as_lists(found: RowList) -> list[list[int]]:
    return [found.ids[start:stop].tolist() for start, stop in itertools.pairwise(found.table_offsets.tolist())]


def test_each_table_has_its_limit() -> None:
    lives = RowLifetimes([None, 9, None], [2.0, 5.0, None], [None, 8, None])
    found = []
    for clock in range(9):
        lives.begin(clock)
        found.append(as_lists(lives.pop_expired()))
        if clock == 0:
            assert lives.use(rows([-1, 4], [3, 8], [1])).tolist() == [True] * 5
            assert lives.num_alive == 3  # that of the default row, 8, and those of the last table never end
        else:
            lives.use(rows([], [], []))
    assert found[LEAST_GAP] == [[4, -1], [], []]  # ascending as unsigned numbers
    assert found[6] == [[], [3], []]
    assert [expired for expired in found if any(expired)] == [found[LEAST_GAP], found[6]]
    assert lives.use(rows([4], [3, 8], [1])).tolist() == [True, True, False, False]


def test_live_rows_bound_the_memory() -> None:
    """A row that every batch uses keeps no entry for each of its uses."""
    lives = RowLifetimes([None], [10.0**9], [None])
    for clock in range(12):
        lives.begin(clock)
        lives.pop_expired()
        lives.use(rows(list(range(40_000))))
    assert lives.num_alive == 40_000
    (queue,) = lives._queues
    assert queue.num_entries <= 2 * 40_000 + (1 << 16) + 40_000


def test_rows_that_are_there_are_as_old_as_the_first_batch() -> None:
    """Used by a batch before it: they can expire a batch earlier than those of the first one."""
    lives = RowLifetimes([None, 9], [2.0, 9.0], [None, None])
    lives.know(rows([1, 2, 3], [7]))
    assert lives.num_alive == 4
    found = []
    for clock in range(5, 9):
        lives.begin(clock)
        found.append(as_lists(lives.pop_expired()))
        assert lives.use(rows([2, 4] if clock == 5 else [2], [])).tolist() == ([False, True] if clock == 5 else [False])
    assert found == [[[], []]] * 3 + [[[1, 3], []]]
    assert lives.use(rows([1], [7])).tolist() == [True, False]
