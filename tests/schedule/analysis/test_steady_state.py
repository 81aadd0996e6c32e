from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.analysis.steady_state import steady_state
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.loop import Loop, Template
from bagpipe.schedule.ir.program import Edge, Stage

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")


def loop_of(**changes: Any) -> Loop:
    values: dict[str, Any] = {"prefetch_depth": 4, "read_ahead": 8, "write_depth": 2}
    return prefetch_loop(**{**values, **changes})


def simulated(loop: Loop, costs: Mapping[str, float], turns: int = 60) -> float:
    """The growth of the makespan, from the simulator of whole programs."""
    ends = [simulate(loop.unroll(count), costs).makespan for count in (turns, 2 * turns)]
    return (ends[1] - ends[0]) / turns


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(OPS), st.integers(0, 20)),
    st.sampled_from(
        [{}, {"direct": True}, {"evict_lag": 1}, {"evict_lag": 2}, {"prefetch_depth": 1, "write_depth": 1}]
    ),
)
def test_it_is_the_simulator_s_growth(costs: dict[str, int], changes: dict[str, object]):
    loop = loop_of(**changes)
    known = {op: float(costs.get(op, 0)) for op in OPS}
    found = steady_state(loop, known)
    assert found.step_s.shape == (1,)
    assert found.step_s[0] == pytest.approx(simulated(loop, known), rel=1e-3, abs=1e-9)


def test_with_ranks_the_exchange_counts():
    loop = loop_of(ranks=2, evict_lag=2)
    ops = ("X_PREPULL", "X_PULL", "X_PUSH", "X_PUSH_LATE", "X_UPDATE_LATE", "X_ACK")
    known = {**dict.fromkeys(OPS, 1.0), **dict.fromkeys(ops, 1.0)}
    assert steady_state(loop, known).step_s[0] == pytest.approx(simulated(loop, known), rel=1e-3)


def test_the_slowest_lane_is_the_step_where_nothing_else_binds():
    """Compute takes 1 + 2 + 1 + 1, everything else is hidden."""
    found = steady_state(loop_of(), {"F": 1, "B": 2, "X_UPDATE": 1, "OPT": 1, "X_FETCH": 4, "X_WRITEBACK": 3})
    assert found.step_s[0] == pytest.approx(5.0)
    assert found.busy["compute"][0] == pytest.approx(1.0)
    assert found.busy["net-in"][0] == pytest.approx(0.8)
    assert found.limit() == "B"
    assert found.shares["B"][0] == pytest.approx(0.4, abs=1e-6)
    assert sum(share[0] for share in found.shares.values()) == pytest.approx(1.0, abs=1e-6)


def test_a_slow_store_is_the_limit():
    found = steady_state(loop_of(), {"F": 1, "B": 2, "X_FETCH": 9})
    assert found.step_s[0] == pytest.approx(9.0)
    assert found.limit() == "X_FETCH"


def test_direct_mode_hides_nothing():
    """Each batch waits for the one before: fetch, insert, forward, backward, update, evict and write-back in turn."""
    costs = {op: 1.0 for op in OPS if op not in ("X_READ", "OPT")}
    found = steady_state(loop_of(direct=True), costs)
    assert found.step_s[0] == pytest.approx(simulated(loop_of(direct=True), costs))
    assert found.step_s[0] > steady_state(loop_of(), costs).step_s[0]


def test_many_points_at_once():
    fetch = np.array([0.0, 4.0, 9.0])
    found = steady_state(loop_of(), {"F": 1, "B": 2, "X_FETCH": fetch})
    assert found.step_s == pytest.approx([3.0, 4.0, 9.0])
    assert [found.limit(point) for point in range(3)] == ["B", "X_FETCH", "X_FETCH"]


def test_latency_adds_where_lanes_wait_for_each_other():
    """In direct mode F waits for the insert of the same batch."""
    costs = {"X_INSERT": 1.0, "F": 1.0}
    near = steady_state(loop_of(direct=True), costs).step_s[0]
    far = steady_state(loop_of(direct=True), costs, latency={("X_INSERT", "F"): 0.5}).step_s[0]
    assert far == pytest.approx(near + 0.5)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_times(cost: float):
    with pytest.raises(ScheduleError, match="cost of F: expected numbers of at least 0"):
        steady_state(loop_of(), {"F": cost})


def test_ten_thousand_points():
    """Vectorised over points: each has the same result alone, to the bit."""
    costs = {op: np.linspace(0.1, 1.0 + number, 10_000) for number, op in enumerate(OPS)}
    found = steady_state(loop_of(), costs)
    assert found.step_s.shape == (10_000,)
    alone = steady_state(loop_of(), {op: values[7_000] for op, values in costs.items()})
    assert alone.step_s[0] == found.step_s[7_000]
    assert {op: share[0] for op, share in alone.shares.items()} == {
        op: share[7_000] for op, share in found.shares.items()
    }


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(OPS), st.floats(0, 20)),
    st.integers(1, 4),
    st.sampled_from([{}, {"direct": True}, {"evict_lag": 1}, {"ranks": 2, "evict_lag": 2}]),
)
def test_windows_longer_than_the_lanes_are_many_are_alike(costs: dict[str, float], depth: int, changes: dict[str, Any]):
    lanes = len(loop_of(**changes).lanes)
    steps = [
        steady_state(loop_of(prefetch_depth=depth, read_ahead=window, **changes), costs or {"F": 1.0}).step_s[0]
        for window in (lanes, lanes + 1, 5_000)
    ]
    assert steps == pytest.approx([steps[0]] * 3, rel=1e-9)


def test_a_pipeline_that_fills_slowly():
    """The last lane is slower by a thousandth, so that thousands of turns pass before the first one feels it."""
    found = steady_state(loop_of(read_ahead=5_000), {"X_READ": 1.0, "F": 0.5, "X_WRITEBACK": 1.001})
    assert found.step_s[0] == pytest.approx(1.001, rel=1e-12)
    assert found.limit() == "X_WRITEBACK"


def test_nothing_takes_time():
    found = steady_state(loop_of(), {"F": np.zeros(3)})
    assert found.step_s.tolist() == [0.0, 0.0, 0.0]
    assert not found.shares
    assert not any(share.any() for share in found.busy.values())


def test_a_lane_that_the_sink_does_not_wait_for_is_left_out():
    lanes = {"compute": (Template(op="F"), Template(op="OPT")), "net-out": (Template(op="X_WRITEBACK"),)}
    loop = Loop(lanes=lanes, source=(0, "F"), sink=(0, "OPT"), stages=(Stage(number=0, name="model"),))
    assert steady_state(loop, {"F": 1.0, "X_WRITEBACK": 5.0}).step_s[0] == pytest.approx(1.0)


def test_a_loop_that_waits_for_itself():
    broken = Loop(
        lanes={"compute": (Template(op="B"), Template(op="F"))},
        source=(0, "F"),
        sink=(0, "B"),
        edges=(Edge(src="F", dst="B"),),
        stages=(Stage(number=0, name="model"),),
    )
    with pytest.raises(ScheduleError, match="the loop waits for itself"):
        steady_state(broken, {"F": 1.0})
