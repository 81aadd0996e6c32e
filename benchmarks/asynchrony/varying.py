"""Simulated time of a batch by synchronous orders and by `dynamic`, where the times of actions vary."""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean

from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.dynamic import dynamic
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.stage_graph import chain
from bagpipe.schedule.registry import DENSE_SCHEDULES

__all__ = ["Varying", "varying_times"]

STAGES, MICROBATCHES, DRAWS = 4, 16, 40
#: Mean time of an action.
MEANS = {"F": 1.0, "B": 2.0}
#: Name -> (share of an action's mean that is exponential, time of a message).
CASES = {
    "vary by a fifth (exponential)": (0.2, 0.0),
    "exponential": (1.0, 0.0),
    "exponential, a message takes 0.5": (1.0, 0.5),
}
#: Micro-batches in flight on the first rank: as 1f1b, and as eager-1f1b.
IN_FLIGHT = (STAGES, 2 * STAGES - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Varying:
    """Mean time of a batch over the draws, in units of a forward.

    Attributes:
        case: how times vary.
        synchronous: schedule -> time.
        dynamic: micro-batches in flight on the first rank -> time.
    """

    case: str
    synchronous: dict[str, float]
    dynamic: dict[str, float]


def varying_times() -> list[Varying]:
    """All cases, with the same times of actions for every schedule."""
    return [_times(case, share, latency) for case, (share, latency) in CASES.items()]


def _times(case: str, share: float, latency: float) -> Varying:
    graph = chain(STAGES, MICROBATCHES)
    found: dict[str, list[float]] = {}
    for seed in range(DRAWS):
        costs = _drawn(seed, share)
        programs = {name: DENSE_SCHEDULES[name].build(graph) for name in ("1f1b", "eager-1f1b")}
        programs |= {str(n): dynamic(graph, 1, in_flight=n, costs=costs, latency=latency) for n in IN_FLIGHT}
        for name, program in programs.items():
            found.setdefault(name, []).append(simulate(program, costs, latency=latency).makespan)
    means = {name: fmean(own) for name, own in found.items()}
    return Varying(
        case=case,
        synchronous={name: mean for name, mean in means.items() if not name.isdecimal()},
        dynamic={name: mean for name, mean in means.items() if name.isdecimal()},
    )


def _drawn(seed: int, share: float) -> dict[str, float]:
    """A time for every action, by its text."""
    rng = random.Random(seed)
    return {
        Action(stage, op, unit).text: mean * (1 - share + share * rng.expovariate(1))
        for stage in range(STAGES)
        for unit in range(MICROBATCHES)
        for op, mean in MEANS.items()
    }
