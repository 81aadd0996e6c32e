"""Steady state of a program of one batch that is repeated: time per batch, and when its actions start.

    batch 0   F F F . . . B B B OPT              start(action, batch b) = start(action) + b * period
    batch 1                 F F F . . . B B B OPT

The period is the least with which all dependencies hold: the greatest ratio, over the cycles of dependencies, of the
cycle's durations to the batches that it spans (Reiter 1968). The search starts at the load of the busiest lane, and
raises the period to the ratio of any cycle that exceeds it until none does (Lawler 1976). The starts are then the
longest paths, the least ones that are not negative. Lanes that are executed in order do not start later than that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.costs import Costs, Latency, cost_function
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.program import Program, unit_counts, units_per_batch

__all__ = ["Periodic", "Wait", "periodic", "repeated"]

#: Share of the period by which a time must exceed another one to be later: above the rounding of sums.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The action waits for `node` of the batch that is `batches` before: it starts `time` after its start."""

    node: int
    batches: int
    time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Periodic:
    """A repeated program of one batch; its actions are nodes, lane after lane.

    Attributes:
        period: time per batch.
        lane_of, actions, costs, starts: by node.
        waits: by node.
        order: the nodes in an order in which a batch can be done.
        slack: times closer than this are equal.
    """

    period: float
    lane_of: tuple[str, ...]
    actions: tuple[Action, ...]
    costs: tuple[float, ...]
    starts: tuple[float, ...]
    waits: tuple[tuple[Wait, ...], ...]
    order: tuple[int, ...]

    @property
    def slack(self) -> float:
        return self.period * _ROUNDING


def repeated(program: Program, num_batches: int) -> Program:
    """The program of one batch for so many batches, each lane one batch after the other."""
    counts = unit_counts(program.stages)

    def later(action: Action, batch: int) -> Action:
        if action.parts:
            return dataclasses.replace(action, parts=tuple(later(part, batch) for part in action.parts))
        if action.index is None:
            return action
        units = units_per_batch(counts, (action.stage, action.op), action.peer)
        return dataclasses.replace(action, index=action.index + batch * units)

    return dataclasses.replace(
        program,
        lanes={
            lane: tuple(later(action, batch) for batch in range(num_batches) for action in actions)
            for lane, actions in program.lanes.items()
        },
    )


def periodic(program: Program, costs: Costs | None = None, *, latency: Latency = 0) -> Periodic:
    """The steady state of a program.

    Args:
        program: of one batch, without messages; its edges lead at most one batch back.
        costs: see `costs`; those of the program's actions hold for every batch.
        latency: added to every dependency that crosses lanes.

    Raises:
        ScheduleError: the program deadlocks (with the cycle), a cost is negative, or the times overflow.
    """
    graph = Graph(repeated(program, 2))
    sizes = [len(actions) for actions in program.lanes.values()]
    nodes = [first + place for first, size in zip(graph.first_nodes, sizes, strict=True) for place in range(size)]
    number = {node: place for place, node in enumerate(nodes)}
    later = {first + size + place: (first + place) for first, size in zip(graph.first_nodes, sizes, strict=True)
             for place in range(size)}  # fmt: skip
    cost = cost_function(costs)
    actions = tuple(graph.actions[node] for node in nodes)
    durations = tuple(float(cost(action)) for action in actions)
    waits: list[tuple[Wait, ...]] = [()] * len(nodes)
    for node, first in later.items():
        found = []
        for predecessor in graph.predecessors[node]:
            source = number[later.get(predecessor.node, predecessor.node)]
            time = durations[source]
            if graph.lane_of[node] != graph.lane_of[predecessor.node]:
                time += latency(actions[source], actions[number[first]]) if callable(latency) else latency
            found.append(Wait(node=source, batches=int(predecessor.node not in later), time=time))
        waits[number[first]] = tuple(found)
    order = tuple(number[node] for node in graph.order() if node in number)
    lane_of = tuple(graph.lane_of[node] for node in nodes)
    loads: dict[str, float] = {}
    for lane, duration in zip(lane_of, durations, strict=True):
        loads[lane] = loads.get(lane, 0) + duration
    period, starts = _solve(waits, order, max(loads.values(), default=0))
    return Periodic(
        period=period,
        lane_of=lane_of,
        actions=actions,
        costs=durations,
        starts=tuple(starts),
        waits=tuple(waits),
        order=order,
    )


def _solve(waits: Sequence[Sequence[Wait]], order: Sequence[int], period: float) -> tuple[float, list[float]]:
    """The period, from a lower bound, and the starts."""
    while True:
        if not period < math.inf:
            raise ScheduleError("costs and latencies add up to more than a number can hold; expected smaller ones")
        starts = [0.0] * len(order)
        came_by: dict[int, Wait] = {}
        cycle: list[Wait] = []
        changed = True
        while changed and not cycle:
            changed = False
            for node in order:
                for wait in waits[node]:
                    start = starts[wait.node] + wait.time - wait.batches * period
                    if start > starts[node] + period * _ROUNDING:
                        starts[node], came_by[node], changed = start, wait, True
            cycle = _cycle(came_by)
        if not cycle:
            return period, starts
        period = sum(wait.time for wait in cycle) / sum(wait.batches for wait in cycle)


def _cycle(came_by: dict[int, Wait]) -> list[Wait]:
    """A cycle of the waits that made the starts; empty: there is none, and no cycle's ratio exceeds the period."""
    seen: dict[int, int] = {}
    for first in came_by:
        node = first
        while node in came_by and node not in seen:
            seen[node] = first
            node = came_by[node].node
        if node in came_by and seen[node] == first:
            cycle = [came_by[node]]
            while cycle[-1].node != node:
                cycle.append(came_by[cycle[-1].node])
            return cycle
    return []
