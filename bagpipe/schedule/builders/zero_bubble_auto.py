"""zb-auto: a zero-bubble schedule for given costs, latency and memory, one stage per rank (after Qi et al. 2024).

    costs ──for every combination of switches: run greedily──> rows, makespan ──┐
    gpipe, 1f1b, eager-1f1b, zb-h1, zb-h2 that fit the memory ──────────────────┴──simulate──> the shortest

A greedy run goes through time. A rank that becomes free takes a ready I or F, by priority; otherwise a waiting W, or it
waits. Four switches change that rule, and no setting of them is best for all costs.

    ahead          forwards a rank may be ahead of its backwards: as 1F1B, as eager-1f1b, or as many as memory holds
    forward_first  F before I, if both are ready
    fills_any_gap  W in every gap; otherwise only in gaps that are at least as long
    frees_first    W before I, if a ready F lacks memory

The result is never slower, by the simulator, than a static schedule that fits: they are among the candidates.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import in_flight
from bagpipe.schedule.analysis.costs import cost_function
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.gpipe import gpipe
from bagpipe.schedule.builders.one_f_one_b import eager_one_f_one_b, one_f_one_b
from bagpipe.schedule.builders.zero_bubble import zb_h1, zb_h2
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["STATIC"]

#: The static schedules of one stage per rank that the result is compared with.
STATIC: tuple[Callable[[StageGraph, int], Program], ...] = (gpipe, one_f_one_b, eager_one_f_one_b, zb_h1, zb_h2)

#: The actions of every rank.
_Rows = tuple[tuple[Action, ...], ...]

#: Op -> duration by stage and micro-batch.
_Durations = Mapping[str, Sequence[Sequence[float]]]

#: Greedy rows that are simulated beside the static schedules, best first.
_SIMULATED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Switches:
    """See the module's table."""

    ahead: int
    forward_first: bool
    fills_any_gap: bool
    frees_first: bool


def zb_auto(
    graph: StageGraph,
    chunks: int,
    *,
    costs: Mapping[str, float] | None = None,
    latency: float = 0,
    memory: str = "",
) -> Program:
    """The shortest candidate, by the simulator; of equals the one whose ranks wait least, then with least in flight.

    Args:
        graph: the stages.
        chunks: 1.
        costs: durations of F, I and W of every stage, and of B if a full backward may be used; None: the op table's.
        latency: of a message, in the unit of the costs.
        memory: most micro-batches in flight: ``4``, or one number per rank: ``4,4,3,2``; empty: no limit.

    Raises:
        ScheduleError: a stage has no cost for F, I or W, a cost is negative, or the memory limit is malformed.
    """
    limits = _limits(memory, graph)
    if costs:
        _check_costs(costs, graph.num_stages)
    best: tuple[float, float, int, Program] | None = None
    for rows in dict.fromkeys(_candidates(graph, costs, latency, limits)):
        if any(in_flight(row) > limit for row, limit in zip(rows, limits, strict=True)):
            continue
        program = dense_program(graph, rows)
        done = simulate(program, costs, latency=latency)
        waits = max(use.span_idle for use in done.lanes.values())
        found = (done.makespan, waits, done.peak_in_flight, program)
        best = found if best is None else min(best, found, key=lambda each: each[:3])
    assert best is not None, "a greedy run keeps to its limits"
    return best[3]


def _candidates(
    graph: StageGraph, costs: Mapping[str, float] | None, latency: float, limits: Sequence[int]
) -> Iterator[_Rows]:
    """Rows with every B split, and with every I that its own W follows at once merged with it where B has a cost."""
    full = frozenset(stage for stage in range(graph.num_stages) if not costs or _has(costs, stage, "B"))
    durations = _durations(graph, costs)
    for builder in STATIC:
        rows = _split(builder(graph, 1).lanes.values())
        yield rows
        yield _merged(rows, full)
    runs = [_Greedy(graph, durations, latency, limits, switches).run() for switches in _all_switches()]
    for _, rows in sorted(runs, key=lambda run: run[0])[:_SIMULATED]:
        yield rows
        yield _merged(rows, full)


def _all_switches() -> Iterator[_Switches]:
    for ahead, forward, fills, frees in itertools.product((1, 2, 0), (False, True), (True, False), (False, True)):
        yield _Switches(ahead=ahead, forward_first=forward, fills_any_gap=fills, frees_first=frees)


def _durations(graph: StageGraph, costs: Mapping[str, float] | None) -> _Durations:
    cost = cost_function(costs)
    stages, micro = range(graph.num_stages), range(graph.microbatches)
    return {op: [[cost(Action(stage, op, index)) for index in micro] for stage in stages] for op in "FIW"}


def _split(rows: Iterable[Sequence[Action]]) -> _Rows:
    """The rows with I and W for every B."""
    return tuple(
        tuple(
            part
            for action in row
            for part in ((replace(action, op=half) for half in "IW") if action.op == "B" else (action,))
        )
        for row in rows
    )


def _merged(rows: _Rows, stages: Collection[int]) -> _Rows:
    """The rows with B for every I of the stages that its own W follows at once."""
    found: list[tuple[Action, ...]] = []
    for row in rows:
        merged: list[Action] = []
        for action in row:
            is_half = action.op == "W" and action.stage in stages and bool(merged)
            if is_half and (merged[-1].op, merged[-1].index) == ("I", action.index):
                merged[-1] = replace(action, op="B")
            else:
                merged.append(action)
        found.append(tuple(merged))
    return tuple(found)


class _Greedy:
    """One greedy run: state of all ranks while time passes.

    Args:
        graph: the stages, one per rank.
        durations: of F, I and W.
        latency: of a message.
        limits: per rank, most micro-batches in flight.
        switches: the rule of choice.
    """

    def __init__(
        self,
        graph: StageGraph,
        durations: _Durations,
        latency: float,
        limits: Sequence[int],
        switches: _Switches,
    ) -> None:
        self._graph = graph
        self._durations = durations
        self._latency = latency
        self._limits = limits
        self._switches = switches
        self._micro = graph.microbatches
        stages = range(graph.num_stages)
        depths = graph.depths
        self._ahead = [max(1, (depths[stage] if switches.ahead == 1 else 2 * depths[stage] - 1)) for stage in stages]
        if not switches.ahead:
            self._ahead = [self._micro for _ in stages]
        self._done = [{"F": 0, "I": 0, "W": 0} for _ in stages]
        self._free = [0.0 for _ in stages]
        # Arrival times of all that an action waits for, and how much of it is still to come.
        self._arrives = {"F": self._table(0.0), "I": self._table(0.0)}
        self._missing = {
            "F": [[len(graph.producers[stage])] * self._micro for stage in stages],
            "I": [[1 + len(graph.consumers[stage])] * self._micro for stage in stages],
        }
        self._events = [(0.0, stage) for stage in stages]
        self._rows: list[list[Action]] = [[] for _ in stages]

    def _table(self, value: float) -> list[list[float]]:
        return [[value] * self._micro for _ in range(self._graph.num_stages)]

    def run(self) -> tuple[float, _Rows]:
        """The makespan and the rows."""
        heapq.heapify(self._events)
        while self._events:
            now, stage = heapq.heappop(self._events)
            if now >= self._free[stage]:
                op = self._choose(now, stage)
                if op:
                    self._start(now, stage, op)
        return max(self._free), tuple(map(tuple, self._rows))

    def _choose(self, now: float, stage: int) -> str:
        """The op that a free rank starts; empty: it waits for its next event."""
        done, switches = self._done[stage], self._switches
        has_weight = done["W"] < done["I"]
        has_room = done["F"] - done["W"] < self._limits[stage]
        may_go_ahead = done["F"] - done["I"] < self._ahead[stage]
        forward, backward = (self._arrival(stage, op) for op in "FI")
        if forward <= now and may_go_ahead and not has_room and has_weight and switches.frees_first:
            return "W"
        if not (has_room and may_go_ahead):
            forward = math.inf
        for op, arrival in (("F", forward), ("I", backward))[:: 1 if switches.forward_first else -1]:
            if arrival <= now:
                return op
        gap = min(forward, backward) - now
        if has_weight and (switches.fills_any_gap or gap >= self._durations["W"][stage][done["W"]]):
            return "W"
        return ""

    def _arrival(self, stage: int, op: str) -> float:
        """The earliest start of the next F or I of a rank, as far as known now."""
        index = self._done[stage][op]
        if index == self._micro or self._missing[op][stage][index]:
            return math.inf
        return self._arrives[op][stage][index]

    def _start(self, now: float, stage: int, op: str) -> None:
        index = self._done[stage][op]
        finish = now + self._durations[op][stage][index]
        self._rows[stage].append(Action(stage, op, index))
        self._done[stage][op] += 1
        self._free[stage] = finish
        heapq.heappush(self._events, (finish, stage))
        if op == "F":
            self._deliver("I", stage, index, finish)
            for consumer in self._graph.consumers[stage]:
                self._deliver("F", consumer, index, finish + self._latency)
        elif op == "I":
            for producer in self._graph.producers[stage]:
                self._deliver("I", producer, index, finish + self._latency)

    def _deliver(self, op: str, stage: int, index: int, time: float) -> None:
        self._missing[op][stage][index] -= 1
        self._arrives[op][stage][index] = max(time, self._arrives[op][stage][index])
        if not self._missing[op][stage][index]:
            heapq.heappush(self._events, (self._arrives[op][stage][index], stage))


def _limits(memory: str, graph: StageGraph) -> list[int]:
    parts = memory.split(",") if memory else [str(graph.microbatches)]
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ScheduleError(f"zb-auto: memory: expected micro-batches in flight, such as 4 or 4,4,3,2, got {memory!r}")
    if len(parts) not in (1, graph.num_stages):
        raise ScheduleError(f"zb-auto: memory: expected one number or {graph.num_stages}, one per rank, got {memory!r}")
    return [int(part) for part in parts] * (graph.num_stages if len(parts) == 1 else 1)


def _check_costs(costs: Mapping[str, float], num_stages: int) -> None:
    for stage in range(num_stages):
        for op in "FIW":
            if not _has(costs, stage, op):
                raise ScheduleError(f"zb-auto: no duration of {op} for stage {stage}: expected {stage}{op} or {op}")


def _has(costs: Mapping[str, float], stage: int, op: str) -> bool:
    return op in costs or f"{stage}{op}" in costs
