"""`WrittenRows`: exactly the written rows, within its memory limit."""

from __future__ import annotations

import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint.written_rows import WrittenRows

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30), max_size=40)


@given(batches=st.lists(st.tuples(st.integers(0, 2), IDS), max_size=60), asked=IDS)
def test_written_rows_are_found(batches: list[tuple[int, list[int]]], asked: list[int]) -> None:
    written = WrittenRows()
    for table, ids in batches:
        written.add(table, np.array(ids, np.int64))
    known = {(table, row) for table, ids in batches for row in ids}
    every = np.array([*asked, *(row for _, ids in batches for row in ids)], np.int64)
    for table in range(3):
        assert written.contains(table, every).tolist() == [(table, row) in known for row in every.tolist()]


def test_the_older_half_is_dropped() -> None:
    written = WrittenRows(max_rows=100)
    for number in range(5):  # 40 rows each: every second one fills a half
        written.add(0, np.arange(40, dtype=np.int64) + 40 * number)
    found = written.contains(0, np.arange(240, dtype=np.int64))
    assert np.flatnonzero(found).tolist() == list(range(80, 200))


def test_rows_written_again_take_no_more_room() -> None:
    written = WrittenRows(max_rows=100)
    written.add(1, np.arange(10, dtype=np.int64))
    for _ in range(1000):
        written.add(0, np.arange(40, dtype=np.int64))
    assert written.contains(1, np.arange(10, dtype=np.int64)).all()


def test_a_batch_is_not_kept_for_the_ids_of_one_table() -> None:
    """The ids of a write are a view of its batch's memory, which is much more."""
    written, batch = WrittenRows(), np.arange(1000, dtype=np.int64)
    written.add(0, batch[:3])
    kept = weakref.ref(batch)
    del batch
    assert kept() is None
    assert written.contains(0, np.arange(5, dtype=np.int64)).tolist() == [True, True, True, False, False]
