from __future__ import annotations

import pytest

from bagpipe.dense.chunks.moments import Moment, Use
from bagpipe.dense.chunks.moves import plan_moves
from bagpipe.dense.chunks.simulate import best_plan, simulate_moves
from tests.dense.chunks.traces import layers_trace


def test_without_moves_a_batch_takes_its_compute() -> None:
    trace = layers_trace(3)
    time = simulate_moves(plan_moves(trace, 9), [2.0] * len(trace), 5.0)
    assert (time.total, time.copying, time.ratio) == (2.0 * len(trace), 0.0, 1.0)


def test_a_copy_beside_longer_compute_costs_no_time() -> None:
    """Three chunks in turn on two slots: one fetch a moment, hidden only if it begins a moment ahead."""
    trace = [Moment(f"use {n}", (Use(n),)) for n in range(3)]
    ahead = simulate_moves(plan_moves(trace, 2, lookahead=1), [4.0] * 3, 3.0)
    late = simulate_moves(plan_moves(trace, 2), [4.0] * 3, 3.0)
    assert (ahead.total, ahead.copying) == (12.0, 9.0)
    assert (late.total, late.copying) == (16.5, 4.5)
    assert simulate_moves(best_plan(trace, 2, [4.0] * 3, 3.0), [4.0] * 3, 3.0) == ahead


def test_a_copy_lane_that_is_busy_all_the_time_sets_the_pace() -> None:
    trace = [Moment(f"use {n}", (Use(n),)) for n in range(3)]
    time = simulate_moves(plan_moves(trace, 2, lookahead=1), [1.0] * 3, 3.0)
    assert time.copying == 9.0
    assert 9.0 <= time.total <= 12.0


@pytest.mark.parametrize("num_slots", [15, 12, 9, 6])
def test_layers_whose_compute_is_longer_than_their_copies_lose_little(num_slots: int) -> None:
    trace = layers_trace(5)
    compute = [0.5 if moment.name.startswith(("step", "gradient")) else 6.0 for moment in trace]
    assert simulate_moves(best_plan(trace, num_slots, compute, 1.0), compute, 1.0).ratio < 1.25
