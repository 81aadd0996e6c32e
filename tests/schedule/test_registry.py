from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES, SCHEDULES, dense_schedule
from bagpipe.schedule.schedule import Schedule

GOLDEN = Path(__file__).parent.parent / "golden" / "schedules"
ASKED_FOR = (
    "prefetch", "gpipe", "1f1b", "eager-1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v", "chimera",
    "graph", "interleaved-zero-bubble", "zb-h2", "v-half", "v-min", "chimera-doubling", "chimera-halving",
    "1f1b-shifted", "zb-auto", "dynamic",
)  # fmt: skip
ASYNCHRONOUS = ("pipedream", "pipedream-vertical", "pipedream-2bw", "spectrain", "spectrain-v2", "pipeoptim")

#: Schedules that do not allow every number of micro-batches.
NEEDS_ROUNDS = ("dualpipe-v", "chimera", "chimera-doubling", "interleaved", "interleaved-zero-bubble")

#: Limit of a builder's length, so that a schedule is easy to add.
MAX_BUILDER_LINES = 60


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_schedule_is_valid_with_its_defaults(schedule: Schedule) -> None:
    check(schedule.program({option.name: option.default for option in schedule.options}))


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_flags_of_options(schedule: Schedule) -> None:
    names = [option.name for option in schedule.options]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)
    assert not {"cost", "latency", "format"} & set(names), "taken by the command line"


def test_schedules_are_found_by_name() -> None:
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())
    assert dense_schedule("gpipe") is SCHEDULES["gpipe"]
    with pytest.raises(ScheduleError, match=r"no dense schedule 'prefetch'; there are 1f1b, .*zb-v"):
        dense_schedule("prefetch")
    assert dense_schedule("pipedream") is ASYNCHRONOUS_SCHEDULES["pipedream"]


def test_all_schedules_are_registered() -> None:
    assert set(SCHEDULES) == {*ASKED_FOR, *ASYNCHRONOUS}
    assert set(DENSE_SCHEDULES) == set(ASKED_FOR) - {"prefetch"}
    assert set(ASYNCHRONOUS_SCHEDULES) == set(ASYNCHRONOUS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_golden_table(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert f"schedule {name} " in text
    assert "--format csv" in text, "its rows"
    assert "--format grid" in text, "its picture"
    assert ("--versions" in text) == (name in ASYNCHRONOUS)


@pytest.mark.parametrize("name", {**DENSE_SCHEDULES, **ASYNCHRONOUS_SCHEDULES})
def test_builders_are_short(name: str) -> None:
    schedule = ASYNCHRONOUS_SCHEDULES.get(name) or DENSE_SCHEDULES[name]
    assert len(inspect.getsource(schedule.builder).splitlines()) < MAX_BUILDER_LINES


@settings(max_examples=40)
@given(
    st.sampled_from([name for name, schedule in DENSE_SCHEDULES.items() if schedule.linear]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.data(),
)
def test_a_linear_schedule_is_valid_for_every_forward_dag(
    name: str, ranks: int, rounds: int, data: st.DataObject
) -> None:
    """Edges that skip stages, several sources and several sinks change dependencies, but not the rows."""
    schedule = DENSE_SCHEDULES[name]
    stages = ranks * schedule.chunks * schedule.num_pipes
    pairs = [(a, b) for b in range(stages) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    micro = rounds * stages if name in NEEDS_ROUNDS else data.draw(st.integers(4, 8))
    program = schedule.build(StageGraph(micro_per_batch=(micro,) * stages, edges=tuple(edges)))
    check(program)
    chain = schedule.build(
        StageGraph(micro_per_batch=(micro,) * stages, edges=tuple((s, s + 1) for s in range(stages - 1)))
    )
    follows_edges = schedule.uses_costs or name == "dynamic"
    if not follows_edges:
        assert program.lanes == chain.lanes
    if not follows_edges and set(edges) <= {(s, s + 1) for s in range(stages - 1)}:
        assert simulate(program).makespan <= simulate(chain).makespan


LINEAR = [name for name, schedule in DENSE_SCHEDULES.items() if schedule.linear]


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_schedule_needs_stages_in_order(name: str) -> None:
    graph = StageGraph(micro_per_batch=(8,) * 4, edges=((1, 0), (0, 2), (2, 3)))
    with pytest.raises(ScheduleError, match=f"{name}: every edge must lead to a higher stage number, got 1-0"):
        DENSE_SCHEDULES[name].build(graph)


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_schedule_needs_equal_micro_batches(name: str) -> None:
    graph = StageGraph(micro_per_batch=(8, 8, 16, 16), edges=((0, 1), (1, 2), (2, 3)))
    with pytest.raises(ScheduleError, match="one number of micro-batches for all stages"):
        DENSE_SCHEDULES[name].build(graph)
