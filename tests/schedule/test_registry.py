from __future__ import annotations

import pytest

from bagpipe.schedule.builders import DENSE_SCHEDULES
from bagpipe.schedule.ir.errors import ScheduleError
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.registry import register, registered


def test_registered_schedules_come_by_name() -> None:
    assert list(registered()) == sorted(registered())
    assert all(schedule.name == name for name, schedule in registered().items())


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'gpipe' is registered twice"):
        register("gpipe", "again")(DENSE_SCHEDULES["gpipe"].builder)


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
