"""Simulator: when would every action of a program run, given what actions cost and links add?

    Program, costs, latency ──> Simulation: start and finish of every action, and the figures read off them

An action starts when its lane is free and everything it waits for has finished and arrived. Lane order is fixed, so
visiting actions in any topological order gives the one schedule there is; no event queue is needed. A RECV is posted
when its lane comes to it and takes no time: what was sent is waited for where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import in_flight
from bagpipe.schedule.analysis.costs import Costs, Latency, cost_function
from bagpipe.schedule.analysis.memory import Memory, peak_bytes
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Hazards, Program

__all__ = ["LaneUse", "Simulation", "TimedAction", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAction:
    """One action and when it ran."""

    lane: str
    action: Action
    start: float
    finish: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneUse:
    """One lane's time.

    Attributes:
        busy: sum of its actions' durations.
        span_idle: idle time between the lane's own first start and last finish; the zero-bubble papers' bubble.
        idle: idle time in the whole makespan.
        peak_in_flight: forwards whose backward is not done, at most; 0 without backwards.
        peak_bytes: held at most; 0 if nobody said what stages hold.
    """

    busy: float
    span_idle: float
    idle: float
    peak_in_flight: int
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What the simulator found.

    Attributes:
        timed: all actions with their times, lane after lane, in lane order.
        makespan: last finish; the first start is 0.
        bubble: ``makespan / busiest lane's load - 1``: for GPipe and 1F1B on P even stages, (P-1)/M.
        lanes: per lane.
        occupancy: per capacity edge (its text), buffers in use at most; never above the edge's delay.
        critical_path: actions from the first to the last finish, each started by the one before.
    """

    timed: tuple[TimedAction, ...]
    makespan: float
    bubble: float
    lanes: Mapping[str, LaneUse]
    occupancy: Mapping[str, int]
    critical_path: tuple[TimedAction, ...]

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
    """Run the program on paper.

    Args:
        program: the program.
        costs: see `costs`.
        latency: added to every dependency that crosses lanes.
        hazards: what the plan says, if there is one; see `Graph`.
        memory: what stages hold.

    Raises:
        ScheduleError: the program deadlocks (the cycle is named), a cost is negative, or the times overflow.
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
    lanes = {
        lane: _lane_use(row, timed[first:end], makespan, memory or Memory())
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


def _lane_use(row: tuple[Action, ...], own: tuple[TimedAction, ...], makespan: float, memory: Memory) -> LaneUse:
    busy = sum(t.finish - t.start for t in own)
    span = own[-1].finish - own[0].start if own else 0
    return LaneUse(
        busy=busy,
        span_idle=span - busy,
        idle=makespan - busy,
        peak_in_flight=in_flight(row),
        peak_bytes=peak_bytes(row, memory),
    )


def _occupancy(edge: Edge, program: Program, timed: tuple[TimedAction, ...]) -> int:
    """Batches whose `dst` has started and whose `src` has not finished, at most: buffers in use."""
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
