from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.handles import DenseHandles, HashHandles, hash_rows
from bagpipe.oracle.lrfu import NO_SCORE
from bagpipe.oracle.plan import RowList
from bagpipe.types.splitmix64 import GOLDEN
from tests.oracle.batches import WIDE_IDS

Rows = list[tuple[int, int]]


def row_list(rows: Rows, num_tables: int = 3) -> RowList:
    rows = sorted(rows)
    counts = np.bincount([table for table, _ in rows], minlength=num_tables)
    return RowList(
        table_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        ids=np.array([i for _, i in rows], dtype=np.int64),
    )


batches_of_rows = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(WIDE_IDS) | st.integers(0, 30)), unique=True, max_size=30),
    max_size=20,
)


@given(batches_of_rows, st.data())
def test_hash_handles_are_a_dictionary(batches: list[Rows], data: st.DataObject) -> None:
    handles = HashHandles(planned_bits=1 << 20)
    known: dict[tuple[int, int], int] = {}
    for rows in batches:
        got = handles.lookup_or_add(row_list(rows)).tolist()
        for row, handle in zip(sorted(rows), got, strict=True):
            assert known.setdefault(row, handle) == handle
        assert len(set(known.values())) == len(known)
        if known:
            gone = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True))
            released = np.array([known.pop(row) for row in gone], dtype=np.int64)
            tables, ids = handles.rows(released)
            assert list(zip(tables.tolist(), ids.tolist(), strict=True)) == gone
            handles.release(released)


def test_many_rows_come_and_go_in_bounded_memory() -> None:
    handles = HashHandles(planned_bits=1 << 20)
    rng = np.random.default_rng(0)
    for _ in range(400):
        ids = np.unique(rng.integers(-(2**63), 2**63, size=500))
        batch = RowList(table_offsets=np.array([0, ids.size]), ids=ids)
        handles.release(handles.lookup_or_add(batch))
    assert handles.num_handles == 1024


def test_a_crowded_table_finds_every_row() -> None:
    """Rows whose probing begins in the same cells, around the end of the table, with deleted cells in between."""
    handles = HashHandles(planned_bits=1 << 20)
    hashes = hash_rows(row_list([(0, i) for i in range(400_000)]))
    crowd = np.flatnonzero((hashes & np.uint64(4095)) >= 4080)[:900]
    batch = RowList(table_offsets=np.array([0, crowd.size]), ids=crowd)
    first = handles.lookup_or_add(batch)
    assert np.unique(first).size == crowd.size
    assert (handles.lookup_or_add(batch) == first).all()
    handles.release(first[::2])
    kept = RowList(table_offsets=np.array([0, crowd[1::2].size]), ids=crowd[1::2])
    assert (handles.lookup_or_add(kept) == first[1::2]).all()
    again = handles.lookup_or_add(batch)
    assert (again[1::2] == first[1::2]).all()
    assert np.unique(again).size == crowd.size


def test_rows_of_two_tables_with_one_hash() -> None:
    other = int(np.uint64((5 + int(GOLDEN)) % 2**64).view(np.int64))  # the first table adds one GOLDEN more
    rows = row_list([(0, other), (1, 5)])
    assert len(set(hash_rows(rows).tolist())) == 1
    handles = HashHandles(planned_bits=1 << 20)
    first, second = handles.lookup_or_add(rows).tolist()
    assert first != second
    assert handles.lookup_or_add(rows).tolist() == [first, second]
    handles.release(np.array([first]))
    assert handles.lookup_or_add(row_list([(1, 5)])).tolist() == [second]


def test_dense_handles_are_row_numbers() -> None:
    handles = DenseHandles((3, 5, 2))
    got = handles.lookup_or_add(row_list([(0, 2), (1, 0), (1, 4), (2, 1)]))
    assert got.tolist() == [2, 3, 7, 9]
    tables, ids = handles.rows(got)
    assert (tables.tolist(), ids.tolist()) == ([0, 1, 1, 2], [2, 0, 4, 1])


def test_admit_never_reports_a_known_row_as_new() -> None:
    # Only 64 bits: collisions are certain, but only in one direction.
    handles = HashHandles(planned_bits=64)
    batch = RowList(table_offsets=np.array([0, 50]), ids=np.arange(50))
    numbers = handles.lookup_or_add(batch)
    assert handles.admit(numbers[:25])[0][0]
    assert not handles.admit(numbers[:25])[0].any()
    handles.release(numbers)
    assert not handles.admit(handles.lookup_or_add(batch)[:25])[0].any()
    dense = DenseHandles((50,))
    assert dense.admit(np.arange(25))[0].all()
    assert dense.admit(np.arange(50))[0].tolist() == [False] * 25 + [True] * 25


def test_few_new_rows_look_known() -> None:
    """A log of a few 100,000 rows has at most one collision, so a job reads what a replay counts."""
    handles = HashHandles()
    rows = np.random.default_rng(4).integers(-(2**63), 2**63, size=200_000)
    mistaken = 0
    for ids in np.split(rows, 20):
        batch = RowList(table_offsets=np.array([0, len(ids)]), ids=ids)
        mistaken += int((~handles.admit(handles.lookup_or_add(batch))[0]).sum())
    assert mistaken <= 1


def test_the_score_of_an_evicted_row_outlives_its_handle() -> None:
    batch = RowList(table_offsets=np.array([0, 5]), ids=np.arange(5))
    for handles in (DenseHandles((9,)), HashHandles()):
        numbers = handles.lookup_or_add(batch)
        assert handles.admit(numbers)[1].max() <= NO_SCORE
        handles.remember(numbers[:3], np.array([70, 80, 90], dtype=np.int32), [2, 1])
        handles.release(numbers)
        is_new, scores = handles.admit(handles.lookup_or_add(batch))
        assert (is_new.any(), scores.tolist()) == (False, [70, 80, 90, NO_SCORE, NO_SCORE])
