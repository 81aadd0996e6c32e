"""`dynamic`: let the ranks decide. Whoever is free takes the best of what is ready; what they did is a static program.

    Program (order in lanes ignored), costs, limits ──events in time order──> Program (order as it came)

This is how message-driven runtimes work (Singh, Bhatele 2022): a rank handles whatever has arrived, backwards first,
and new micro-batches enter as old ones are done. The order found can be checked, simulated, drawn and run like any
other.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping

from bagpipe.schedule.actions import Action
from bagpipe.schedule.costs import Costs, Latency, cost_function
from bagpipe.schedule.errors import ScheduleError
from bagpipe.schedule.graph import Graph
from bagpipe.schedule.ops import OPS, Role
from bagpipe.schedule.program import Program

__all__ = ["backward_first", "dynamic"]

#: Action -> what sorts it among those that are ready; the least is taken.
Priority = Callable[[Action], tuple[int, ...]]

_RANKS: Mapping[Role, int] = {"overlap": 0, "backward": 1, "input_grad": 1, "forward": 2, "weight_grad": 3}


def backward_first(action: Action) -> tuple[int, ...]:
    """Backwards before forwards before weight gradients, then the oldest micro-batch, then the last stage."""
    first = action.atoms[0]
    return (_RANKS.get(OPS[action.op].role, 1), first.index or 0, -first.stage)


def dynamic(
    program: Program,
    priority: Priority = backward_first,
    *,
    costs: Costs | None = None,
    latency: Latency = 0,
    limits: Mapping[int, int] | None = None,
) -> Program:
    """The program with every lane's actions in the order in which its rank takes them.

    Args:
        program: compute actions; their order in the lanes does not count, dependencies do.
        priority: among ready actions of a lane, the least is taken; ties go to the earlier one in the lane.
        costs, latency: as in `simulate`.
        limits: stage -> micro-batches in flight at most, forwards whose backward (W if split) is not done; a stage that
            is not listed has no limit.

    Raises:
        ScheduleError: the program has SEND or RECV, its dependencies form a cycle, or a limit brings it to a halt.
    """
    if any(OPS[atom.op].role in ("send", "recv") for atom in program.atoms()):
        raise ScheduleError("expected compute actions only: sends follow from the order that is sought")
    ranks = _Ranks(program, priority, costs, latency, limits or {})
    ranks.run()
    if any(ranks.todo.values()):
        lane, left = next((lane, nodes) for lane, nodes in ranks.todo.items() if nodes)
        raise ScheduleError(f"lane {lane} cannot go on: {ranks.graph.actions[left[0]].text} never gets ready")
    return dataclasses.replace(program, lanes={lane: tuple(row) for lane, row in ranks.rows.items()})


class _Ranks:
    """All lanes, as far as they got."""

    def __init__(
        self,
        program: Program,
        priority: Priority,
        costs: Costs | None,
        latency: Latency,
        limits: Mapping[int, int],
    ) -> None:
        self.graph = Graph(program)
        self.rows: dict[str, list[Action]] = {lane: [] for lane in program.lanes}
        self.todo: dict[str, list[int]] = {lane: [] for lane in program.lanes}
        for node, lane in enumerate(self.graph.lane_of):
            self.todo[lane].append(node)
        self._priority, self._cost, self._latency, self._limits = priority, cost_function(costs), latency, limits
        sources = [{p.node for p in found if p.edge is not None} for found in self.graph.predecessors]
        self._missing = [len(found) for found in sources]
        self._ready_at: list[float] = [0] * len(sources)
        self._users: list[list[int]] = [[] for _ in sources]
        for node, found in enumerate(sources):
            for source in found:
                self._users[source].append(node)
        self._ready: dict[str, list[tuple[tuple[int, ...], int]]] = {lane: [] for lane in self.rows}
        self._busy: dict[str, bool] = dict.fromkeys(self.rows, False)
        self._in_flight: Counter[tuple[int, int]] = Counter()

    def run(self) -> None:
        """Go on until nothing more happens. Events at the same time are all seen before any rank decides."""
        events: list[tuple[float, int, bool]] = []  # (time, node, it finishes; else it gets ready)
        for node, missing in enumerate(self._missing):
            if not missing:
                heapq.heappush(events, (0, node, False))
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, node, finishes = heapq.heappop(events)
                if finishes:
                    self._finish(node, now, events)
                else:
                    lane = self.graph.lane_of[node]
                    heapq.heappush(self._ready[lane], (self._priority(self.graph.actions[node]), node))
            for lane in self.rows:
                if not self._busy[lane]:
                    self._take(lane, now, events)

    def _finish(self, node: int, now: float, events: list[tuple[float, int, bool]]) -> None:
        lane, action = self.graph.lane_of[node], self.graph.actions[node]
        self._busy[lane] = False
        for atom in action.atoms:
            if atom.op in ("B", "W"):
                self._in_flight[atom.stage, atom.pipe] -= 1
        for user in self._users[node]:
            arrival = now
            if self.graph.lane_of[user] != lane:
                latency = self._latency
                arrival += latency(action, self.graph.actions[user]) if callable(latency) else latency
            self._ready_at[user] = max(self._ready_at[user], arrival)
            self._missing[user] -= 1
            if not self._missing[user]:
                heapq.heappush(events, (self._ready_at[user], user, False))

    def _take(self, lane: str, now: float, events: list[tuple[float, int, bool]]) -> None:
        """Start the best ready action that the limits allow."""
        held: list[tuple[tuple[int, ...], int]] = []
        ready = self._ready[lane]
        while ready:
            best = heapq.heappop(ready)
            if self._allowed(self.graph.actions[best[1]]):
                self._start(lane, best[1], now, events)
                break
            held.append(best)
        for entry in held:
            heapq.heappush(ready, entry)

    def _allowed(self, action: Action) -> bool:
        forwards = [atom for atom in action.atoms if atom.op == "F" and atom.stage in self._limits]
        return all(self._in_flight[atom.stage, atom.pipe] < self._limits[atom.stage] for atom in forwards)

    def _start(self, lane: str, node: int, now: float, events: list[tuple[float, int, bool]]) -> None:
        action = self.graph.actions[node]
        for atom in action.atoms:
            if atom.op == "F":
                self._in_flight[atom.stage, atom.pipe] += 1
        self.todo[lane].remove(node)
        self.rows[lane].append(action)
        self._busy[lane] = True
        heapq.heappush(events, (now + self._cost(action), node, True))
