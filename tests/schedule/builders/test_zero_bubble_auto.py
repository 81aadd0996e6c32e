from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check, in_flight
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.zero_bubble_auto import STATIC
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.registry import DENSE_SCHEDULES
from tests.schedule.dense import peaks, run

AUTO = DENSE_SCHEDULES["zb-auto"]

#: A set for which every static schedule is beaten.
UNEQUAL = {
    f"{stage}{op}": cost
    for op, costs in {"F": (1, 3, 3, 2), "I": (2, 3, 4, 3), "W": (2, 3, 1, 2)}.items()
    for stage, cost in enumerate(costs)
}


def auto(graph: StageGraph, **values: Any) -> Program:
    program = AUTO.configured(values).build(graph)
    check(program)
    return program


def fits(program: Program, limit: int) -> bool:
    return all(in_flight(row) <= limit for row in program.lanes.values())


def test_it_is_never_worse_than_the_best_static_schedule() -> None:
    """500 random cost sets, with and without measured full backwards, latency and a memory limit."""
    rng = random.Random(17)
    better = 0
    for turn in range(500):
        graph = chain(rng.randint(2, 4), rng.randint(1, 4))
        ops = "FIWB" if turn % 2 else "FIW"
        costs = {f"{stage}{op}": rng.uniform(0.5, 2) * (1 + (op == "B")) for stage in range(4) for op in ops}
        latency, limit = rng.choice([0, 0.3]), rng.randint(1, 5)
        ours = AUTO.configured({"costs": costs, "latency": latency, "memory": str(limit)}).build(graph)
        assert fits(ours, limit)
        if turn % 2 == 0:
            costs |= {f"{stage}B": costs[f"{stage}I"] + costs[f"{stage}W"] for stage in range(4)}
        static = [program for builder in STATIC if fits(program := builder(graph, 1), limit)]
        spans = [simulate(program, costs, latency=latency).makespan for program in static]
        best, own = min(spans, default=float("inf")), simulate(ours, costs, latency=latency).makespan
        assert own <= best * (1 + 1e-12)
        better += own < best * (1 - 1e-12)
    assert better > 100


def test_it_beats_the_static_schedules_on_unequal_stages() -> None:
    graph, full = chain(4, 8), {f"{stage}B": UNEQUAL[f"{stage}I"] + UNEQUAL[f"{stage}W"] for stage in range(4)}
    spans = {name: run(name, 4, 8, costs=UNEQUAL | full).makespan for name in ("1f1b", "zb-h1", "zb-h2")}
    assert spans == {"1f1b": 89, "zb-h1": 81, "zb-h2": 77}
    assert simulate(auto(graph, costs=UNEQUAL, memory="6"), UNEQUAL).makespan == 73, "rank 1 is busy for 72"


def test_memory_buys_time() -> None:
    spans = [simulate(auto(chain(4, 8), costs=UNEQUAL, memory=str(n)), UNEQUAL).makespan for n in (1, 2, 3, 4, 6)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]


def test_equal_costs_give_the_best_static_schedule() -> None:
    """Of equal makespans it takes the one in which ranks wait least: zb-h2, as far as memory allows."""
    assert auto(chain(4, 8)).lanes == DENSE_SCHEDULES["zb-h2"].build(chain(4, 8)).lanes
    assert auto(chain(4, 8), memory="4").lanes == DENSE_SCHEDULES["zb-h1"].build(chain(4, 8)).lanes


def test_a_full_backward_is_used_where_it_is_cheaper_than_its_halves() -> None:
    costs = {"F": 1, "I": 1, "W": 1, "B": 1.2}
    assert any(action.op == "B" for row in auto(chain(3, 6), costs=costs).lanes.values() for action in row)
    costs = {"F": 1, "I": 1, "W": 1}
    assert not any(action.op == "B" for row in auto(chain(3, 6), costs=costs).lanes.values() for action in row)


@settings(max_examples=25)
@given(data=st.data())
def test_limits_hold_on_every_dag(data: st.DataObject) -> None:
    stages, micro = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    pairs = [(a, b) for b in range(stages) for a in range(b) if data.draw(st.booleans())]
    limits = [data.draw(st.integers(1, 4)) for _ in range(stages)]
    costs = {f"{s}{op}": data.draw(st.sampled_from([0, 1, 2, 0.5])) for s in range(stages) for op in "FIW"}
    graph = StageGraph(micro_per_batch=(micro,) * stages, edges=tuple(pairs))
    program = auto(graph, costs=costs, memory=",".join(map(str, limits)))
    held = peaks(simulate(program, costs))
    assert all(peak <= limit for peak, limit in zip(held, limits, strict=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"costs": {"F": 1, "I": 1}}, "zb-auto: no duration of W for stage 0: expected 0W or W"),
        ({"costs": {"F": 1, "I": 1, "0W": 1}}, "zb-auto: no duration of W for stage 1: expected 1W or W"),
        ({"memory": "0"}, "memory: expected micro-batches in flight, such as 4 or 4,4,3,2, got '0'"),
        ({"memory": "2,x"}, "got '2,x'"),
        ({"memory": "2,2,2"}, "memory: expected one number or 2, one per rank, got '2,2,2'"),
    ],
)
def test_what_it_cannot_use_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        auto(chain(2, 4), **values)
