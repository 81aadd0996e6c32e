from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.row_order import Position, RowIndex, RowRange, row_permutation, segment_order, split


@pytest.mark.parametrize(
    ("rows", "fraction", "train", "held_out"),
    [(30, 0.1, 27, 3), (80_000, 0.1, 72_000, 8_000), (100, 0.29, 71, 29), (9, 0.1, 9, 0), (1, 0.9, 1, 0), (7, 0, 7, 0)],
)
def test_the_last_rows_are_held_out(rows: int, fraction: float, train: int, held_out: int) -> None:
    assert split(rows, fraction, "train") == RowRange(low=0, high=train)
    assert split(rows, fraction, "eval") == RowRange(low=train, high=train + held_out)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(1, 20))
def test_windows(low: int, size: int, first: int, rows: int) -> None:
    row_range = RowRange(low=low, high=low + size)
    inside = [row - first for row in range(first, first + rows) if low <= row < low + size]
    got = row_range.within(first, rows)
    assert list(range(*got)) == inside
    if inside:
        assert row_range.overlaps(first, rows)


def test_index_lists_the_segments_of_a_window() -> None:
    index = RowIndex(first_rows=(0, 10, 10, 25, 30))
    assert index.overlapping(RowRange(low=0, high=None)) == [0, 2, 3]
    assert index.overlapping(RowRange(low=10, high=25)) == [2]
    assert index.overlapping(RowRange(low=24, high=26)) == [2, 3]
    assert index.overlapping(RowRange(low=30, high=30)) == []


def test_orders_are_permutations_drawn_from_seed_and_epoch() -> None:
    numbers = list(range(40))
    assert segment_order(numbers, 1, 0, shuffle=False) == numbers
    orders = [segment_order(numbers, seed, epoch, shuffle=True) for seed in (0, 1, -1) for epoch in (0, 1)]
    assert all(sorted(order) == numbers for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    rows = [row_permutation(40, 0, epoch, segment, block) for epoch in (0, 1) for segment in (0, 1) for block in (0, 1)]
    assert len({tuple(order.tolist()) for order in [*rows, np.array(orders[0])]}) == len(rows) + 1
    assert all(sorted(order) == numbers for order in rows)


def test_golden_orders() -> None:
    # Part of the format of a saved position: a resumed job must continue the same order.
    assert segment_order(list(range(8)), 7, 3, shuffle=True) == GOLDEN_SEGMENTS
    assert row_permutation(8, 7, 3, 2, 1).tolist() == GOLDEN_ROWS


GOLDEN_SEGMENTS = [2, 5, 7, 3, 0, 6, 4, 1]
GOLDEN_ROWS = [2, 0, 7, 6, 4, 5, 1, 3]


def test_positions_survive_json() -> None:
    position = Position(epoch=1, segment=2, block=3, row=4, first_row=5, batch=6, skipped=8, skipped_before=7)
    order = {"seed": 1, "shuffle": True}
    state = json.loads(json.dumps(position.to_state(order)))
    assert Position.from_state(state, order) == position


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "expected version 1, got 2"),
        ({"row": -1}, "row must be an integer from 0, got -1"),
        ({"batch": "x"}, "batch must be an integer from 0, got 'x'"),
        ({"epoch": None}, "epoch must be an integer from 0, got None"),
        ({"order": {"phase": "train", "shuffle": False, "batch_size": 2}}, "batch_size was 2 when saved, is 1 now"),
        ({"order": [1]}, r"expected the settings of its order, got '\[1\]'"),
        ({"order": None}, "expected the settings of its order, got 'None'"),
        ({"first_row": 1 << 62}, f"first_row must be an integer from 0, got {1 << 62}"),
        ({"share": 2.0}, "share must be a number from 0 to 1, got 2.0"),
        ({"share": [[]]}, "share must be a number from 0 to 1"),
        ({"skipped_before": 1}, "0 rows skipped, and 1 before the block"),
        ({"batch": 3}, "batch must be 0 after 0 rows, got 3"),
        ({"row": 3, "batch": 1}, "batch must be 3 after 3 rows, got 1"),
        ({"first_row": 2, "skipped": 3, "skipped_before": 3}, "batch must be -1 after -1 rows, got 0"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    order = {"phase": "train", "shuffle": False, "batch_size": 1}
    with pytest.raises(InputError, match=message):
        Position.from_state(Position().to_state(order) | change, order)
