from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.resharding.layouts import Box, Layout
from tests.schedule.resharding.arrays import layout, layouts


def test_parts_of_a_small_tensor() -> None:
    def parts(each: Layout) -> list[tuple[int, int, int, int]]:
        return [(box.first_row, box.end_row, box.first_column, box.end_column) for box in each.boxes(5, 4)]

    assert parts(layout("batch", 0, 2)) == [(0, 2, 0, 4), (2, 5, 0, 4)]
    assert parts(layout("batch", 0, 3, (2, 0, 1))) == [(0, 3, 0, 4), (3, 3, 0, 4), (3, 5, 0, 4)]
    assert parts(layout("features", 0, 2)) == [(0, 5, 0, 2), (0, 5, 2, 4)]
    assert parts(layout("replicated", 7, 2)) == [(0, 5, 0, 4)] * 2


@given(layouts(), st.integers(0, 9), st.integers(1, 5))
def test_split_parts_cover_the_tensor_once(each: Layout, rows: int, columns: int) -> None:
    count = np.zeros((rows, columns), dtype=np.int64)
    for box in each.boxes(rows, columns):
        count[box.index] += 1
        assert count[box.index].size == box.elements
    assert (count == (len(each.ranks) if each.kind == "replicated" else 1)).all()


def test_a_box_in_another() -> None:
    outer = Box(first_row=2, end_row=6, first_column=1, end_column=4)
    inner = Box(first_row=3, end_row=5, first_column=1, end_column=2)
    assert outer.contains(inner)
    assert not inner.contains(outer)
    assert inner.within(outer) == (slice(1, 3), slice(0, 1))


@pytest.mark.parametrize(
    ("kind", "ranks", "shares", "message"),
    [
        ("rows", (0,), (), "a layout is one of batch, features, replicated, got 'rows'"),
        ("batch", (), (), "a layout needs different ranks from 0, at least one, got []"),
        ("batch", (1, 1), (), "a layout needs different ranks from 0, at least one, got [1, 1]"),
        ("replicated", (0, 1), (1, 1), "a replicated layout has no shares, got [1, 1]"),
        (
            "batch",
            (0, 1),
            (1,),
            "a layout on 2 ranks needs one share per rank, at least 0 and not all 0, got [1]",
        ),
        (
            "features",
            (0, 1),
            (0, 0),
            "a layout on 2 ranks needs one share per rank, at least 0 and not all 0, got [0, 0]",
        ),
    ],
)
def test_refused(kind: str, ranks: tuple[int, ...], shares: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        Layout(kind=kind, ranks=ranks, shares=shares)  # type: ignore[arg-type]
    assert str(refused.value) == message
