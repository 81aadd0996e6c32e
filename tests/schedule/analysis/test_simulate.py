from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.memory import Memory
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.builders.prefetch_loop import prefetch_loop
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.program import Edge, Program
from bagpipe.schedule.lowering.sends import add_sends
from tests.schedule.dense import dense
from tests.schedule.period import period

OPS = ("X_READ", "X_FETCH", "X_EVICT", "X_INSERT", "F", "B", "X_UPDATE", "OPT", "X_WRITEBACK")


def test_latency_counts_between_lanes_only() -> None:
    program = dense("gpipe", 2, 1)
    assert simulate(program, latency=5).makespan == 1 + 5 + 1 + 2 + 5 + 2
    assert simulate(program, latency=lambda src, dst: 5 if src.op == "F" else 0).makespan == 11


def test_critical_path_is_gapless() -> None:
    result = simulate(dense("1f1b", 4, 8))
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].finish == result.makespan
    assert all(a.finish == b.start for a, b in pairwise(path))


def test_receives_are_posted_and_waited_for_where_they_are_used() -> None:
    """The message of 1F1 is due before 1B0 in the row but arrives later: the lane continues meanwhile."""
    program = dense("1f1b", 4, 8)
    lowered = add_sends(program, {lane: rank for rank, lane in enumerate(program.lanes)})
    for latency in (0, 0.5, 3):
        assert simulate(lowered, latency=latency).makespan == simulate(program, latency=latency).makespan


def test_peaks_per_lane() -> None:
    result = simulate(dense("1f1b", 3, 4), memory=Memory(activation_bytes={0: 5, 1: 7}, param_bytes={2: 100}))
    assert [use.peak_in_flight for use in result.lanes.values()] == [3, 2, 1]
    assert [use.peak_bytes for use in result.lanes.values()] == [15, 14, 100]


@pytest.mark.parametrize(("evict_lag", "exposed"), [(1, 2 * 2), (2, 0), (None, 0)])
def test_evictions_that_wait_for_the_batch_before_are_exposed(evict_lag: int | None, exposed: int) -> None:
    """EVICT and INSERT follow UPDATE of the batch before, beside OPT: all but OPT's 1 of 3 is exposed, in 2 batches."""
    loop = prefetch_loop(prefetch_depth=4, read_ahead=8, write_depth=2, evict_lag=evict_lag)
    found = simulate(loop.unroll(3), {"F": 3, "B": 3, "X_EVICT": 2})
    assert found.exposed == found.lanes["compute"].waits.get("0X_INSERT", 0) == exposed


def test_a_deadlock_names_its_cycle() -> None:
    edges = (Edge(src="X_INSERT", dst="X_FETCH"), Edge(src="X_FETCH", dst="X_INSERT"))
    program = Program(lanes={"a": (parse("0X_FETCH0"),), "b": (parse("0X_INSERT0"),)}, edges=edges)
    with pytest.raises(ScheduleError, match="0X_FETCH0 waits for 0X_INSERT0 waits for 0X_FETCH0"):
        simulate(program)


def test_times_that_overflow_are_refused() -> None:
    with pytest.raises(ScheduleError, match="add up to more than a number can hold"):
        simulate(dense("1f1b", 2, 2), {"F": 1e308, "B": 1e308})


def test_an_empty_program_takes_no_time() -> None:
    result = simulate(Program(lanes={"a": ()}))
    assert (result.makespan, result.bubble, result.critical_path) == (0, 0, ())


def steady(result: Simulation, batches: int) -> float:
    """Mean time per batch in the second half of the run."""
    ends = [t.finish for t in result.timed if t.action.op == "OPT"]
    return (ends[-1] - ends[batches // 2 - 1]) / (batches - batches // 2)


costs = st.fixed_dictionaries({op: st.integers(0, 9) for op in OPS})


@given(costs, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_simulation_settles_at_the_computed_period(
    cost: dict[str, int], depth: int, ahead: int, write: int, direct: bool
) -> None:
    loop = prefetch_loop(prefetch_depth=depth, read_ahead=ahead, write_depth=write, direct=direct)
    expected = period(loop, lambda t: cost[t.op]).value
    batches = 60
    result = simulate(loop.unroll(batches), cost)
    # Over k batches a periodic schedule is off by at most a constant: the cost of one batch's actions.
    assert abs(Fraction(steady(result, batches)) - expected) <= Fraction(sum(cost.values()), batches // 2)
    for edge in loop.edges:
        if edge.kind == "capacity":
            assert edge.delay is not None
            assert result.occupancy[edge.text] <= edge.delay
