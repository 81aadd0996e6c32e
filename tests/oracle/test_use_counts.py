"""Counts of uses against a dictionary; errors of the sketch against their bound."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.oracle.plan import RowList
from bagpipe.oracle.use_counts import BoundedUses, HashedUses, SketchedUses, UseCounts, make_counts, sketch_error
from tests.oracle.batches import WIDE_IDS

Uses = list[Counter[int]]


def rows_of(uses: Uses) -> tuple[RowList, np.ndarray]:
    """Rows of a batch, and the uses of each, from the uses by table."""
    ids = [sorted(table) for table in uses]
    offsets = np.cumsum([0, *map(len, ids)])
    rows = RowList(table_offsets=offsets, ids=np.array([i for own in ids for i in own], dtype=np.int64))
    return rows, np.array([table[i] for table, own in zip(uses, ids, strict=True) for i in own], dtype=np.int64)


def logs(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[Uses]]:
    """Uses of two tables, by batch."""
    return st.lists(st.tuples(*2 * [st.lists(ids, max_size=9).map(Counter)]).map(list), max_size=8)


def check_exact(counts: UseCounts, log: list[Uses]) -> None:
    so_far: Counter[tuple[int, int]] = Counter()
    for uses in log:
        so_far.update({(t, i): n for t, table in enumerate(uses) for i, n in table.items()})
        total = counts.add(*rows_of(uses))
        assert total.tolist() == [so_far[t, i] for t, table in enumerate(uses) for i in sorted(table)]


@given(log=logs(st.integers(0, 6)))
def test_bounded_counts_are_exact(log: list[Uses]) -> None:
    check_exact(BoundedUses((7, 7)), log)


@given(log=logs(st.sampled_from(WIDE_IDS)))
def test_hashed_counts_are_exact(log: list[Uses]) -> None:
    check_exact(HashedUses(), log)


def test_hashed_counts_grow() -> None:
    check_exact(HashedUses(), [[Counter(range(start, start + 3000)), Counter()] for start in (0, 1500, 3000)])


@given(log=logs(st.integers(0, 30)), cells=st.sampled_from([1, 2, 8, 1024]))
def test_a_sketch_never_counts_too_little(log: list[Uses], cells: int) -> None:
    exact, sketch = BoundedUses((31, 31)), SketchedUses(2, cells)
    for uses in log:
        rows, numbers = rows_of(uses)
        assert (sketch.add(rows, numbers) >= exact.add(rows, numbers)).all()


def test_a_sketch_is_that_of_its_table_alone() -> None:
    both, alone = SketchedUses(2, 8), SketchedUses(1, 8)
    for start in range(0, 60, 10):
        table = Counter(range(start, start + 15))
        other = Counter(range(7 * start, 7 * start + 9))
        assert both.add(*rows_of([other, table]))[len(other) :].tolist() == alone.add(*rows_of([table])).tolist()


@pytest.mark.parametrize("cells", [64, 1024])
def test_errors_of_a_sketch_stay_in_their_bound(cells: int) -> None:
    sketch, exact = SketchedUses(1, cells), HashedUses()
    random = np.random.default_rng(3)
    num_uses, errors = 0, np.empty(0, dtype=np.int64)
    for _ in range(20):
        uses = Counter(random.zipf(1.2, 500).astype(np.int64).tolist())
        rows, numbers = rows_of([uses])
        errors = sketch.add(rows, numbers) - exact.add(rows, numbers)
        num_uses += sum(uses.values())
    share, probability = sketch_error(cells)
    assert np.mean(errors > share * num_uses) <= probability


def test_counts_are_chosen_by_the_tables() -> None:
    made = [make_counts([7, 9]), make_counts([7, None]), make_counts([1 << 40]), make_counts([7, None], 8)]
    assert [type(counts) for counts in made] == [BoundedUses, HashedUses, HashedUses, SketchedUses]
