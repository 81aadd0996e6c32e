from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.registry import DENSE_SCHEDULES, SCHEDULES, Schedule, dense_schedule

GOLDEN = Path(__file__).parent.parent / "golden" / "schedules"
ASKED_FOR = (
    "prefetch", "gpipe", "1f1b", "eager-1f1b", "interleaved", "breadth-first", "zb-h1", "zb-v", "dualpipe-v", "chimera",
    "graph",
)  # fmt: skip

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


def test_all_schedules_are_registered() -> None:
    assert set(SCHEDULES) == set(ASKED_FOR)
    assert set(DENSE_SCHEDULES) == set(ASKED_FOR) - {"prefetch"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_a_golden_table(name: str) -> None:
    text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert f"schedule {name} " in text
    assert "--format csv" in text, "its rows"
    assert "--format grid" in text, "its picture"


@pytest.mark.parametrize("name", DENSE_SCHEDULES)
def test_builders_are_short(name: str) -> None:
    assert len(inspect.getsource(DENSE_SCHEDULES[name].builder).splitlines()) < MAX_BUILDER_LINES


def build(name: str, **values: object) -> None:
    schedule = SCHEDULES[name]
    schedule.program({option.name: option.default for option in schedule.options} | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"microbatches": "many"}, "microbatches: expected numbers such as 8 or 32,16,8, got 'many'"),
        ({"microbatches": "8,"}, "microbatches: expected numbers"),
        ({"microbatches": "8,4"}, "microbatches: expected one number or 4, one per stage, got 2"),
        ({"microbatches": "0"}, "micro-batches per stage must be at least 1"),
        ({"stages": 0}, "stages must be 1 to 100000, got 0"),
        ({"edges": "0-1,2"}, "edges: expected numbers such as 0-1,1-2, got '0-1,2'"),
        ({"edges": "0-1,1-2,2-0"}, "cycle: 0 -> 1 -> 2 -> 0"),
        ({"edges": "0-4"}, "edge 0-4 names a stage that is not among 0 to 3"),
        ({"chunks": 2}, "chunks must be 1, got 2"),
    ],
)
def test_bad_stages_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        build("graph", **values)


def test_options_describe_the_stages() -> None:
    schedule = SCHEDULES["graph"]
    program = schedule.program({"stages": 3, "microbatches": "4,2,2", "chunks": 1, "edges": "1-0,2-0"})
    assert dict(program.micro_per_batch) == {0: 4, 1: 2, 2: 2}
    assert {(e.src_stage, e.dst_stage) for e in program.edges if e.src == e.dst == "F"} == {(1, 0), (2, 0)}


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
    micro = rounds * stages if name in ("dualpipe-v", "chimera", "interleaved") else data.draw(st.integers(1, 8))
    program = schedule.build(StageGraph(micro_per_batch=(micro,) * stages, edges=tuple(edges)))
    check(program)
    chain = schedule.build(
        StageGraph(micro_per_batch=(micro,) * stages, edges=tuple((s, s + 1) for s in range(stages - 1)))
    )
    assert program.lanes == chain.lanes
    if set(edges) <= {(s, s + 1) for s in range(stages - 1)}:
        assert simulate(program).makespan <= simulate(chain).makespan


def test_a_schedule_of_one_batch_is_not_repeated() -> None:
    with pytest.raises(ScheduleError, match="gpipe: one batch at a time, got 2 batches"):
        DENSE_SCHEDULES["gpipe"].build(chain(2, 2), num_batches=2)


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "ranks"),
    [
        ("1f1b", 4, None, 4),
        ("interleaved", 8, None, 4),
        ("interleaved", 8, 4, 2),
        ("zb-v", 8, None, 4),
        ("chimera", 4, None, 4),
    ],
)
def test_ranks(name: str, stages: int, chunks: int | None, ranks: int) -> None:
    schedule = DENSE_SCHEDULES[name]
    assert schedule.num_ranks(stages, chunks) == ranks
    assert list(schedule.build(chain(stages, 8), chunks).lanes) == [f"rank{number}" for number in range(ranks)]


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "message"),
    [
        ("1f1b", 4, 2, "1f1b: chunks must be 1, got 2"),
        ("zb-v", 4, 1, "zb-v: chunks must be 2, got 1"),
        ("interleaved", 4, 0, "interleaved: chunks must be at least 1, got 0"),
        ("interleaved", 5, None, "interleaved: stages must be a multiple of 2 chunks, got 5"),
        ("gpipe", 0, None, "stages must be at least 1, got 0"),
    ],
)
def test_stages_that_do_not_fit_are_refused(name: str, stages: int, chunks: int | None, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        DENSE_SCHEDULES[name].num_ranks(stages, chunks)


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
