from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.schedule.actions import Action, parse
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.period import period
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.program import Edge, Program
from bagpipe.schedule.simulate import Simulation, measured_costs, simulate
from tests.schedule.dense import chain, gpipe, one_f_one_b

SIZES = [(p, m) for p in (2, 4, 8) for m in (p, 2 * p, 4 * p)]
OPS = ("X_READ", "X_GET", "X_EVICT", "X_PUT", "F", "B", "X_UPDATE", "OPT", "X_STORE")


@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_gpipe_closed_forms(stages: int, micro: int) -> None:
    result = simulate(chain(stages, micro, gpipe))
    assert result.makespan == (micro + stages - 1) * 3
    assert result.bubble == pytest.approx((stages - 1) / micro)
    assert result.peak_in_flight == micro


@pytest.mark.parametrize(("stages", "micro"), SIZES)
def test_1f1b_closed_forms(stages: int, micro: int) -> None:
    result = simulate(chain(stages, micro, one_f_one_b))
    assert result.makespan == (micro + stages - 1) * 3
    peaks = [use.peak_in_flight for use in result.lanes.values()]
    assert peaks == [min(micro, stages - rank) for rank in range(stages)]


def test_latency_counts_between_lanes_only() -> None:
    program = chain(2, 1, gpipe)
    assert simulate(program, latency=5).makespan == 1 + 5 + 1 + 2 + 5 + 2
    assert simulate(program, latency=lambda src, dst: 5 if src.op == "F" else 0).makespan == 11


def test_critical_path_is_gapless() -> None:
    result = simulate(chain(4, 8, one_f_one_b))
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].finish == result.makespan
    assert all(a.finish == b.start for a, b in pairwise(path))


def test_costs_are_looked_up_from_the_special_to_the_general() -> None:
    program = Program(lanes={"a": (*(Action(0, "F", n) for n in range(3)), Action(0, "B", 0))})
    assert simulate(program, {"0F1": 10, "F": 5, "0F": 4}).makespan == 4 + 10 + 4 + 2
    assert simulate(program, lambda action: 1 if action.op == "F" else 0).makespan == 3


def test_an_overlap_costs_its_parts() -> None:
    program = Program(lanes={"a": (parse("(0F0;1B0)OVERLAP_F_B"),)})
    assert simulate(program).makespan == 3


def test_measured_costs_are_medians() -> None:
    assert measured_costs({"F": [5.0, 1.0, 2.0], "B": []}) == {"F": 2.0}


def test_negative_costs_are_refused() -> None:
    with pytest.raises(ScheduleError, match="at least 0"):
        simulate(chain(1, 1, gpipe), {"F": -1})


def test_a_deadlock_names_its_cycle() -> None:
    edges = (Edge(src="X_PUT", dst="X_GET"), Edge(src="X_GET", dst="X_PUT"))
    program = Program(lanes={"a": (parse("0X_GET0"),), "b": (parse("0X_PUT0"),)}, edges=edges)
    with pytest.raises(ScheduleError, match="0X_GET0 waits for 0X_PUT0 waits for 0X_GET0"):
        simulate(program)


def test_an_empty_program_takes_no_time() -> None:
    result = simulate(Program(lanes={"a": ()}))
    assert (result.makespan, result.bubble, result.critical_path) == (0, 0, ())


def steady(result: Simulation, batches: int) -> float:
    """Mean time per batch in the second half of the run."""
    ends = [t.finish for t in result.timed if t.action.op == "OPT"]
    return (ends[-1] - ends[batches // 2 - 1]) / (batches - batches // 2)


costs = st.fixed_dictionaries({op: st.integers(0, 9) for op in OPS})


@settings(max_examples=60)
@given(costs, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_simulation_settles_at_the_computed_period(
    cost: dict[str, int], depth: int, ahead: int, write: int, direct: bool
) -> None:
    loop = prefetch(prefetch_depth=depth, read_ahead=ahead, write_depth=write, direct=direct)
    expected = period(loop, lambda t: cost[t.op]).value
    batches = 60
    result = simulate(loop.unroll(batches), cost)
    # Over k batches a periodic schedule is off by a constant at most: the cost of one batch's actions.
    assert abs(Fraction(steady(result, batches)) - expected) <= Fraction(sum(cost.values()), batches // 2)
    for edge in loop.edges:
        if edge.kind == "capacity":
            assert edge.delay is not None
            assert result.occupancy[edge.text] <= edge.delay
