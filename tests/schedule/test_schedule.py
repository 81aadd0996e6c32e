"""Limits of schedules: stages, micro-batches, chunks, batches."""

from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES, SCHEDULES


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


def test_an_asynchronous_schedule_has_any_number_of_batches() -> None:
    schedule = ASYNCHRONOUS_SCHEDULES["pipeoptim"]
    values = {option.name: option.default for option in schedule.options} | {
        "stages": 2,
        "batches": 3,
        "prediction_offset": 1,
    }
    assert values.keys() == {"stages", "microbatches", "chunks", "edges", "batches", "prediction_offset"}
    assert schedule.program(values) == schedule.configured({"prediction_offset": 1}).build(chain(2, 8), num_batches=3)
    assert schedule.build(chain(2, 8), num_batches=3) == schedule.loop(chain(2, 8)).unroll(3)
    assert "prediction_offset" not in {option.name for option in ASYNCHRONOUS_SCHEDULES["pipedream"].options}
    with pytest.raises(ScheduleError, match="stages times micro-batches must be at most"):
        schedule.loop(chain(1000, 1001))
    with pytest.raises(ScheduleError, match="chunks must be 1, got 2"):
        schedule.loop(chain(4, 4), 2)
