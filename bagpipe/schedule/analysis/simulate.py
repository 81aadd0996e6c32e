"""Simulator of programs: start and finish of every action, from costs and latencies.

    Program, costs, latency ──> Simulation: times of all actions, makespan, bubble, occupancy, critical path

An action starts when its lane is free and all its dependencies have finished and arrived. Lane order is fixed, so any
topological order of visits gives the same times, without an event queue. A RECV takes no time and does not wait: the
consumer of the message does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import in_flight
from bagpipe.schedule.analysis.costs import Costs, Latency, cost_function
from bagpipe.schedule.analysis.memory import Memory, peak_bytes
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Hazards, Program

__all__ = ["Simulation", "TimedAction", "simulate"]

#: Operations with which the rows of a batch are in place, and those that look them up.
_ROWS_READY, _LOOKUPS = frozenset({"X_INSERT", "X_PREPULL", "X_PULL"}), frozenset({"F", "X_EMBED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """An action with its start and finish."""

    lane: str
    action: Action
    start: float
    finish: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneUse:
    """Time and memory of a lane.

    Attributes:
        busy: sum of its actions' durations.
        span_idle: idle time between the lane's own first start and last finish; the bubble of the zero-bubble papers.
        idle: idle time in the whole makespan.
        waits: operation -> idle time between the lane's actions that ends with it. As the trainer's ``waits_s``.
        exposed: the part of it that lookups wait for rows.
        peak_in_flight: peak number of forwards whose backward is not done; 0 without backwards.
        peak_bytes: peak memory; 0 without `Memory`.
    """

    busy: float
    span_idle: float
    idle: float
    waits: Mapping[str, float]
    exposed: float
    peak_in_flight: int
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of the simulator.

    Attributes:
        timed: all actions with their times, lane by lane.
        makespan: last finish; the first start is 0.
        bubble: ``makespan / load of the busiest lane - 1``; (P-1)/M for GPipe and 1F1B with P equal stages.
        lanes: per lane.
        occupancy: capacity edge (its text) -> peak number of buffers in use, at most the edge's delay.
        critical_path: actions to the last finish; each starts when the previous one finishes.
    """

    timed: tuple[TimedAction, ...]
    makespan: float
    bubble: float
    lanes: Mapping[str, _LaneUse]
    occupancy: Mapping[str, int]
    critical_path: tuple[TimedAction, ...]

    @property
    def exposed(self) -> float:
        """Time that lanes wait for rows between their actions: what is not hidden of the rows' way."""
        return sum(use.exposed for use in self.lanes.values())

    @property
    def peak_in_flight(self) -> int:
        return max((use.peak_in_flight for use in self.lanes.values()), default=0)


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    latency: Latency = 0,
    hazards: Hazards | None = None,
    memory: Memory | None = None,
) -> Simulation:
    """Simulate a program.

    Args:
        program: the program.
        costs: see `costs`.
        latency: added to every dependency that crosses lanes.
        hazards: the plan's hazards; see `Graph`.
        memory: bytes that stages hold.

    Raises:
        ScheduleError: the program deadlocks (with the cycle), a cost is negative, or the times overflow.
    """
    graph = Graph(program, hazards)
    cost = cost_function(costs)
    actions = graph.actions
    start: list[float] = [0] * len(actions)
    finish: list[float] = [0] * len(actions)
    started_by: list[int | None] = [None] * len(actions)
    for node in graph.order():
        posts = OPS[actions[node].op].role == "recv"
        for predecessor in graph.predecessors[node]:
            if posts and predecessor.node != graph.lane_before[node]:
                continue
            arrival = finish[predecessor.node]
            if graph.lane_of[predecessor.node] != graph.lane_of[node]:
                arrival += latency(actions[predecessor.node], actions[node]) if callable(latency) else latency
            if arrival > start[node] or started_by[node] is None:
                start[node] = max(arrival, start[node])
                started_by[node] = predecessor.node
        finish[node] = start[node] + cost(actions[node])
    timed = tuple(
        TimedAction(lane=graph.lane_of[n], action=actions[n], start=start[n], finish=finish[n])
        for n in range(len(actions))
    )
    makespan = max(finish, default=0)
    if not makespan < math.inf:
        raise ScheduleError("costs and latencies add up to more than a number can hold; expected smaller ones")
    ends = [*graph.first_nodes[1:], len(actions)]
    ended_by = [None if node is None else actions[node] for node in started_by]
    lanes = {
        lane: _lane_use(row, timed[first:end], ended_by[first:end], makespan, memory or Memory())
        for (lane, row), first, end in zip(program.lanes.items(), graph.first_nodes, ends, strict=True)
    }
    busiest = max((use.busy for use in lanes.values()), default=0)
    return Simulation(
        timed=timed,
        makespan=makespan,
        bubble=makespan / busiest - 1 if busiest else 0,
        lanes=lanes,
        occupancy={e.text: _occupancy(e, program, timed) for e in program.edges if e.kind == "capacity"},
        critical_path=_critical_path(timed, finish, started_by),
    )


def _lane_use(
    row: tuple[Action, ...],
    own: tuple[TimedAction, ...],
    ended_by: list[Action | None],
    makespan: float,
    memory: Memory,
) -> _LaneUse:
    busy = sum(t.finish - t.start for t in own)
    span = own[-1].finish - own[0].start if own else 0
    waits: dict[str, float] = {}
    exposed: float = 0
    for (before, timed), by in zip(pairwise(own), ended_by[1:], strict=True):
        if by is not None and timed.start > before.finish:
            name = f"{by.stage}{by.op}"
            waits[name] = waits.get(name, 0) + timed.start - before.finish
            if by.op in _ROWS_READY and timed.action.op in _LOOKUPS:
                exposed += timed.start - before.finish
    return _LaneUse(
        busy=busy,
        span_idle=span - busy,
        idle=makespan - busy,
        waits=waits,
        exposed=exposed,
        peak_in_flight=in_flight(row),
        peak_bytes=peak_bytes(row, memory),
    )


def _occupancy(edge: Edge, program: Program, timed: tuple[TimedAction, ...]) -> int:
    """Peak number of batches whose `dst` has started and whose `src` has not finished: buffers in use."""
    moments: list[tuple[float, int]] = []
    for key, change in ((edge.dst_key, 1), (edge.src_key, -1)):
        units = program.units_per_batch(key)
        # The first unit of dst takes the buffer, the last unit of src gives it back.
        at_unit = 0 if change > 0 else units - 1
        own = [t for t in timed if any((a.stage, a.op) == key for a in t.action.atoms)]
        by_time = sorted(t.start if change > 0 else t.finish for t in own)
        moments += [(by_time[n], change) for n in range(at_unit, len(by_time), units)]
    live = peak = 0
    for _, change in sorted(moments):  # at equal times a release (-1) sorts before a take
        live += change
        peak = max(peak, live)
    return peak


def _critical_path(
    timed: tuple[TimedAction, ...], finish: list[float], started_by: list[int | None]
) -> tuple[TimedAction, ...]:
    path: list[TimedAction] = []
    node = max(range(len(timed)), key=finish.__getitem__) if timed else None
    while node is not None:
        path.append(timed[node])
        node = started_by[node]
    return tuple(reversed(path))
