"""Steady state of a loop: the time of a turn, for many sets of costs at once, and what it depends on.

    Loop ──dependencies──> graph of waits ──costs of P points──> critical cycle ──> step time of each point
    finish(a, t) = cost(a) + max(finish(b, t - turns) + latency(b, a))       over all b that a waits for

The recurrence is that of the runner's lanes: an action starts when its lane is free and what it waits for has finished.
Its growth per turn is the greatest ratio of cost to turns over the cycles of the dependencies (max-plus algebra:
Baccelli et al., Synchronization and Linearity, 1992, theorem 3.28). `cycle_ratio` finds that cycle, so neither the
start of the pipeline nor the length of a window matters.

A window longer than the lanes are many changes nothing where lanes have no latency: the cycle through its edge costs at
most all actions together, which is at most the number of lanes times the busiest lane, and it has at least the turns of
the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.cycle_ratio import GraphEdge, greatest_ratio
from bagpipe.schedule.analysis.cycles import delay_free_cycle
from bagpipe.schedule.ir.loop import Loop, LoopDependency

__all__ = ["SteadyState", "steady_state"]

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadyState:
    """Result for P points.

    Attributes:
        step_s: float64 [P]: time of a turn.
        busy: lane -> float64 [P]: share of the time that its actions take.
        shares: op -> float64 [P]: share of the critical cycle's time, which sum to 1 with those of latencies. To first
            order a faster op shortens the step by so much. Where cycles are equally long, one of them has all shares.
    """

    step_s: _Floats
    busy: Mapping[str, _Floats]
    shares: Mapping[str, _Floats]

    def limit(self, point: int = 0) -> str:
        """The op with the largest share of a point."""
        return max(self.shares, key=lambda op: float(self.shares[op][point]))


def steady_state(
    loop: Loop,
    costs: Mapping[str, ArrayLike],
    *,
    latency: Mapping[tuple[str, str], ArrayLike] | None = None,
) -> SteadyState:
    """Find out how long the turns of a loop take once its pipeline is full.

    Args:
        loop: hazards without a constant delay are not waited for.
        costs: seconds of an action by its op, or by stage and op (``0F``), which comes first; one number or float64
            [P]. What is in neither takes no time.
        latency: (op that is waited for, op that waits) -> seconds between lanes.

    Raises:
        ScheduleError: a cost is negative or not finite, or the loop deadlocks.
    """
    known = {name: np.atleast_1d(np.asarray(cost, np.float64)) for name, cost in costs.items()}
    delays = {pair: np.atleast_1d(np.asarray(each, np.float64)) for pair, each in (latency or {}).items()}
    for name, values in (*known.items(), *((f"{pair}", each) for pair, each in delays.items())):
        if not _is_time(values).all():
            raise ScheduleError(f"cost of {name}: expected numbers of at least 0, got {values[~_is_time(values)][0]:g}")
    if delay_free_cycle(loop):
        raise ScheduleError("the loop waits for itself: no order of one turn's actions is possible")
    shape = np.broadcast_shapes((1,), *(values.shape for values in (*known.values(), *delays.values())))
    of_templates = _costs(loop, known, shape)
    critical = greatest_ratio(_edges(loop, delays), of_templates)
    lanes: dict[str, list[int]] = {}
    ops: dict[str, list[int]] = {}
    for number, (lane, template) in enumerate(loop.templates):
        lanes.setdefault(lane, []).append(number)
        ops.setdefault(template.op, []).append(number)
    of_cycle = np.where(critical.nodes, of_templates, 0.0)
    return SteadyState(
        step_s=critical.ratio,
        busy={lane: _share(of_templates[own].sum(axis=0), critical.ratio) for lane, own in lanes.items()},
        shares={
            op: _share(of_cycle[own].sum(axis=0), critical.ratio * critical.turns)
            for op, own in ops.items()
            if of_templates[own].any()
        },
    )


def _is_time(values: _Floats) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.isfinite(values) & (values >= 0)
    return found


def _share(part: _Floats, whole: _Floats) -> _Floats:
    """Their ratio; 0 where the whole is 0."""
    found: _Floats = np.divide(part, whole, out=np.zeros(whole.shape), where=whole > 0)
    return found


def _costs(loop: Loop, known: Mapping[str, _Floats], shape: tuple[int, ...]) -> _Floats:
    """float64 [templates, P]: seconds of each action."""
    found = np.zeros((len(loop.templates), *shape))
    for number, (_, template) in enumerate(loop.templates):
        for key in (f"{template.stage}{template.op}", template.op):
            if key in known:
                found[number] = known[key]
                break
    return found


def _edges(loop: Loop, delays: Mapping[tuple[str, str], _Floats]) -> list[GraphEdge]:
    """The waits of all actions that the loop's sink depends on: what it does not wait for cannot slow it down."""
    dependencies = loop.dependencies()
    sources: dict[int, list[int]] = {}
    for each in dependencies:
        sources.setdefault(each.dst, []).append(each.src)
    needed = {number for number, (_, template) in enumerate(loop.templates) if template.key == loop.sink}
    needed = needed or set(range(len(loop.templates)))
    left = list(needed)
    while left:
        new = [number for number in sources.get(left.pop(), ()) if number not in needed]
        needed.update(new)
        left += new
    return [
        GraphEdge(src=each.src, dst=each.dst, turns=each.turns, delay=_delay(loop, each, delays))
        for each in sorted(dependencies, key=lambda each: each.turns)
        if each.dst in needed
    ]


def _delay(loop: Loop, dependency: LoopDependency, delays: Mapping[tuple[str, str], _Floats]) -> _Floats | None:
    """Seconds between two lanes."""
    (lane, source), (other, target) = (loop.templates[number] for number in (dependency.src, dependency.dst))
    return None if lane == other else delays.get((source.op, target.op))
