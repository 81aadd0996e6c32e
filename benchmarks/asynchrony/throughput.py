"""Simulated time of a batch in the steady state: forward 1, backward 2, all else free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.asynchronous import drained
from bagpipe.schedule.ir.loop import Loop
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, DENSE_SCHEDULES

__all__ = ["Speed", "speeds", "steady"]

COSTS = {"F": 1.0, "B": 2.0, "OPT": 0.0, "PRED": 0.0, "PRED_B": 0.0}
#: Forward and backward of a micro-batch.
WORK = COSTS["F"] + COSTS["B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Times of a batch, in units of a forward of a micro-batch.

    Attributes:
        free: the next batch needs nothing of this one but weights.
        rows: the next batch reads rows after the updates of this one.
        synchronous: 1F1B.
        least: what the busiest rank computes.
    """

    schedule: str
    stages: int
    microbatches: int
    free: float
    rows: float
    synchronous: float
    least: float


def speeds(settings: list[tuple[int, int]]) -> list[Speed]:
    """All asynchronous schedules that allow the (stages, micro-batches)."""
    found = []
    for stages, microbatches in settings:
        graph = chain(stages, microbatches)
        synchronous = simulate(DENSE_SCHEDULES["1f1b"].build(graph), COSTS).makespan
        for name, schedule in ASYNCHRONOUS_SCHEDULES.items():
            if name == "pipedream-2bw" and microbatches < stages - 1:
                continue
            loop = schedule.loop(graph)
            found.append(
                Speed(
                    schedule=name,
                    stages=stages,
                    microbatches=microbatches,
                    free=steady(loop, COSTS, first=4 * stages),
                    rows=_steady_with_rows(loop, drained(graph, loop), synchronous),
                    synchronous=synchronous,
                    least=WORK * microbatches,
                )
            )
    return found


def steady(loop: Loop, costs: Mapping[str, float], *, first: int, latency: float = 0.0) -> float:
    """Time of a batch between two long programs, of `first` and of eight more batches."""
    more = 8
    times = [simulate(loop.unroll(number), costs, latency=latency).makespan for number in (first, first + more)]
    return (times[1] - times[0]) / more


def _steady_with_rows(loop: Loop, order: Loop, synchronous: float) -> float:
    """Nothing of a batch begins before the last backward of the batch before: the time of a batch alone."""
    alone = simulate(order.unroll(1), COSTS).makespan
    assert alone == synchronous, "the order of 1F1B"
    return alone
