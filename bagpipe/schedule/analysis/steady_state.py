"""Steady state of a loop: the time of a turn, for many sets of costs at once, and what it depends on.

    Loop ──dependencies──> recurrence over turns ──costs of P points──> step time of each point
    finish(a, t) = cost(a) + max(finish(b, t - turns) + latency(b, a))       over all b that a waits for

The recurrence is that of the runner's lanes: an action starts when its lane is free and what it waits for has finished.
Its growth per turn is the greatest ratio of cost to turns over the cycles of the dependencies (max-plus algebra:
Baccelli et al., Synchronization and Linearity, 1992, theorem 3.28).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.loop import Loop, LoopDependency

__all__ = ["SteadyState", "steady_state"]

#: Turns before the measured ones, for the pipeline to fill: more than any bound of batches in flight that is common.
_WARM_UP = 32
#: Turns over which growth is averaged: a multiple of the turns of most cycles.
_MEASURED = 240
#: Relative change of a cost whose effect is measured.
_NUDGE = 1e-3

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SteadyState:
    """Result for P points.

    Attributes:
        step_s: float64 [P]: time of a turn.
        busy: lane -> float64 [P]: share of the time that its actions take.
        shares: op -> float64 [P]: share of the step that would go if the op took no time, to first order. The ops whose
            shares sum to 1 are the critical cycle; latencies have the rest.
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
    with_shares: bool = True,
) -> SteadyState:
    """Simulate a loop until its turns take equal times.

    Args:
        loop: hazards without a constant delay are not waited for.
        costs: seconds of an action by its op, or by stage and op (``0F``), which comes first; one number or float64
            [P]. What is in neither takes no time.
        latency: (op that is waited for, op that waits) -> seconds between lanes.
        with_shares: find out `SteadyState.shares`, which takes one more simulation for each op with a cost.

    Raises:
        ScheduleError: a cost is negative or not finite, or the loop deadlocks.
    """
    known = {name: np.atleast_1d(np.asarray(cost, np.float64)) for name, cost in costs.items()}
    delays = {pair: np.atleast_1d(np.asarray(each, np.float64)) for pair, each in (latency or {}).items()}
    for name, values in (*known.items(), *((f"{pair}", each) for pair, each in delays.items())):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ScheduleError(f"cost of {name}: expected numbers of at least 0, got {values.min():g}")
    shapes = np.broadcast_shapes((1,), *(values.shape for values in (*known.values(), *delays.values())))
    recurrence = _Recurrence(loop, delays)
    of_templates = recurrence.costs(known, shapes)
    step_s = recurrence.step_s(of_templates)
    busy = {
        lane: np.divide(
            sum((of_templates[number] for number in numbers), np.zeros(shapes)),
            step_s,
            out=np.zeros(shapes),
            where=step_s > 0,
        )
        for lane, numbers in recurrence.lanes.items()
    }
    shares: dict[str, _Floats] = {}
    for op in dict.fromkeys(template.op for _, template in loop.templates) if with_shares else ():
        numbers = [number for number, (_, template) in enumerate(loop.templates) if template.op == op]
        if any(of_templates[number].any() for number in numbers):
            shorter = of_templates.copy()
            shorter[numbers] *= 1 - _NUDGE
            saved = step_s - recurrence.step_s(shorter)
            shares[op] = np.divide(saved / _NUDGE, step_s, out=np.zeros(shapes), where=step_s > 0)
    return SteadyState(step_s=step_s, busy=busy, shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Wait:
    """Action that another one waits for, so many turns before, and the latency in between."""

    src: int
    turns: int
    delay: _Floats | None


class _Recurrence:
    """The dependencies of a loop, in an order in which one turn can be computed."""

    def __init__(self, loop: Loop, delays: Mapping[tuple[str, str], _Floats]) -> None:
        self.loop = loop
        self.delays = delays
        self.lanes: dict[str, list[int]] = {}
        for number, (lane, _) in enumerate(loop.templates):
            self.lanes.setdefault(lane, []).append(number)
        waits: list[list[_Wait]] = [[] for _ in loop.templates]
        for each in loop.dependencies():
            waits[each.dst].append(_Wait(src=each.src, turns=each.turns, delay=self._delay(each)))
        self.waits = waits
        self.order = self._order()
        self.depth = 1 + max((each.turns for own in waits for each in own), default=0)

    def _order(self) -> list[int]:
        """Templates after those that they wait for in the same turn.

        Raises:
            ScheduleError: there is no such order.
        """
        missing = [sum(each.turns <= 0 for each in own) for own in self.waits]
        ready = [number for number, count in enumerate(missing) if not count]
        order: list[int] = []
        followers: list[list[int]] = [[] for _ in self.waits]
        for number, own in enumerate(self.waits):
            for each in own:
                if each.turns <= 0:
                    followers[each.src].append(number)
        while ready:
            number = ready.pop()
            order.append(number)
            for follower in followers[number]:
                missing[follower] -= 1
                if not missing[follower]:
                    ready.append(follower)
        if len(order) < len(self.waits):
            raise ScheduleError("the loop waits for itself: no order of one turn's actions is possible")
        return order

    def costs(self, known: Mapping[str, _Floats], shape: tuple[int, ...]) -> _Floats:
        """float64 [templates, P]: seconds of each action."""
        found = np.zeros((len(self.waits), *shape))
        for number, (_, template) in enumerate(self.loop.templates):
            for key in (f"{template.stage}{template.op}", template.op):
                if key in known:
                    found[number] = known[key]
                    break
        return found

    def step_s(self, costs: _Floats) -> _Floats:
        """float64 [P]: time of a turn, once the pipeline is full."""
        depth = self.depth
        ring = np.zeros((depth, *costs.shape))  # finishes of the last turns; before the first one nothing is waited for
        sink = [number for number, (_, template) in enumerate(self.loop.templates) if template.key == self.loop.sink]
        last = sink[-1] if sink else self.order[-1]
        start, begun = np.zeros(costs.shape[1:]), np.zeros(costs.shape[1:])
        row = ring[0]
        for turn in range(_WARM_UP + depth + _MEASURED):
            row = ring[turn % depth]
            for number in self.order:
                start.fill(0)
                for each in self.waits[number]:
                    if each.turns > turn:
                        continue
                    finish = ring[(turn - each.turns) % depth, each.src]
                    np.maximum(start, finish if each.delay is None else finish + each.delay, out=start)
                np.add(start, costs[number], out=row[number])
            if turn == _WARM_UP + depth - 1:
                begun = row[last].copy()
        elapsed: _Floats = (row[last] - begun) / _MEASURED
        return elapsed

    def _delay(self, dependency: LoopDependency) -> _Floats | None:
        if not self.delays:
            return None
        (lane, source), (other, target) = (self.loop.templates[n] for n in (dependency.src, dependency.dst))
        return None if lane == other else self.delays.get((source.op, target.op))
