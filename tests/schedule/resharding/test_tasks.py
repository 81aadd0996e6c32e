from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.schedule.resharding.layouts import Layout
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import layout, sides


def spelt(source: Layout, target: Layout, rows: int, columns: int) -> list[str]:
    return [
        f"{t.box.first_row}-{t.box.end_row} x {t.box.first_column}-{t.box.end_column}: {t.sources} -> {t.receivers}"
        for t in unit_tasks(source, target, rows, columns)
    ]


def test_small_ones() -> None:
    assert spelt(layout("batch", 0, 2), layout("batch", 2, 3), 6, 1) == [
        "0-2 x 0-1: (0,) -> (2,)",
        "2-3 x 0-1: (0,) -> (3,)",
        "3-4 x 0-1: (1,) -> (3,)",
        "4-6 x 0-1: (1,) -> (4,)",
    ]
    assert spelt(layout("replicated", 0, 2), layout("features", 2, 2), 3, 4) == [
        "0-3 x 0-2: (0, 1) -> (2,)",
        "0-3 x 2-4: (0, 1) -> (3,)",
    ]
    assert spelt(layout("batch", 0, 2), layout("replicated", 1, 2), 2, 1) == [
        "0-1 x 0-1: (0,) -> (1, 2)",
        "1-2 x 0-1: (1,) -> (2,)",
    ]


def test_a_layout_that_stays_has_none() -> None:
    for kind in ("batch", "features", "replicated"):
        assert unit_tasks(layout(kind, 0, 3), layout(kind, 0, 3), 5, 4) == ()
    assert unit_tasks(layout("batch", 0, 2), layout("batch", 2, 2), 0, 4) == ()


@given(sides(), st.integers(0, 9), st.integers(1, 6))
def test_every_element_reaches_who_needs_it_once(pair: tuple[Layout, Layout], rows: int, columns: int) -> None:
    source, target = pair
    given_to = {rank: np.zeros((rows, columns), dtype=np.int64) for rank in (*source.ranks, *target.ranks)}
    for rank, box in zip(source.ranks, source.boxes(rows, columns), strict=True):
        given_to[rank][box.index] += 1
    for task in unit_tasks(source, target, rows, columns):
        assert task.box.elements
        for rank in task.sources:
            assert rank in source.ranks
        for rank in task.receivers:
            given_to[rank][task.box.index] += 1
    for rank, box in zip(target.ranks, target.boxes(rows, columns), strict=True):
        assert (given_to[rank][box.index] == 1).all()
        assert given_to[rank].max(initial=1) == 1
