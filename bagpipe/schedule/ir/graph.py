"""`Graph`: the actions of a program and their dependencies, from lane order, edges and SEND/RECV pairs.

    Program, hazards ──> nodes (actions), predecessors ──> topological order, or the cycle that prevents one

Checker, simulator and interpreter share this graph, so they agree on the meaning of a program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, Hazards, Program, unit_counts, units_per_batch

__all__ = ["Graph", "partner"]

#: SEND op -> (RECV op, step to the receiver's stage; None: the peer the action names).
_PARTNERS: Mapping[str, tuple[str, int | None]] = {
    "SEND_F": ("RECV_F", 1),
    "SEND_B": ("RECV_B", -1),
    "SENDX_F": ("RECVX_F", None),
    "SENDX_B": ("RECVX_B", None),
}

_Name = tuple[int, str, int | None]


def partner(send: Action) -> Action:
    """The RECV that matches a SEND. SEND names the sender's stage, RECV the receiver's."""
    op, step = _PARTNERS[send.op]
    stage = send.peer if send.peer is not None else send.stage + (step or 0)
    return Action(stage=stage, op=op, index=send.index, peer=None if send.peer is None else send.stage, pipe=send.pipe)


@dataclass(frozen=True, slots=True)
class _Predecessor:
    """A node that must finish first; `edge` is None for lane order and SEND/RECV pairs."""

    node: int
    edge: Edge | None = None


class Graph:
    """Actions as nodes 0 … n-1, lane after lane.

    Attributes:
        actions, lane_of, predecessors: per node.
        first_nodes: per lane, the node of its first action.

    Args:
        program: the program.
        hazards: the plan's hazards by name; a hazard that is missing has its edge's constant delay.

    Raises:
        ScheduleError: an action waits for one that no lane performs, or for a later batch.
    """

    def __init__(self, program: Program, hazards: Hazards | None = None) -> None:
        self.program = program
        self.actions: list[Action] = []
        self.lane_of: list[str] = []
        self.lane_before: list[int | None] = []
        self.first_nodes: list[int] = []
        for lane, actions in program.lanes.items():
            self.first_nodes.append(len(self.actions))
            for position, action in enumerate(actions):
                self.lane_before.append(len(self.actions) - 1 if position else None)
                self.lane_of.append(lane)
                self.actions.append(action)
        self._units = unit_counts(program.stages)
        self._nodes: dict[_Name, list[tuple[int, int]]] = {}  # -> (node, pipe)
        for node, action in enumerate(self.actions):
            for atom in action.atoms:
                for op in (atom.op, *OPS[atom.op].provides):
                    self._nodes.setdefault((atom.stage, op, atom.index), []).append((node, atom.pipe))
        self._edges_into: dict[tuple[int, str], list[Edge]] = {}
        for edge in program.edges:
            self._edges_into.setdefault(edge.dst_key, []).append(edge)
        self._receivers = {
            partner(a): n for n, action in enumerate(self.actions) for a in action.atoms if a.op in _PARTNERS
        }
        self.predecessors = [self._find_predecessors(node, hazards or {}) for node in range(len(self.actions))]

    def _find_predecessors(self, node: int, hazards: Hazards) -> tuple[_Predecessor, ...]:
        before = self.lane_before[node]
        found = {} if before is None else {before: _Predecessor(before)}
        for atom in self.actions[node].atoms:
            sender = self._receivers.get(atom)
            if sender is not None:
                found.setdefault(sender, _Predecessor(sender))
            for op in (atom.op, *OPS[atom.op].provides):
                for edge in self._edges_into.get((atom.stage, op), ()):
                    for source in self._sources(edge, atom, hazards):
                        if source != node:  # parts of one overlap do not wait for each other
                            found[source] = _Predecessor(source, edge)
        return tuple(found.values())

    def _sources(self, edge: Edge, atom: Action, hazards: Hazards) -> Iterator[int]:
        if atom.index is None:
            return
        units = units_per_batch(self._units, edge.dst_key, atom.peer)
        src_units = units_per_batch(self._units, edge.src_key)
        batch, unit = divmod(atom.index, units)
        src_batch = _source_batch(edge, batch, hazards)
        if src_batch < 0:
            return
        same_pipe = OPS[edge.src].unit == OPS[edge.dst].unit == "micro"
        for src_unit in edge.source_units(unit, units, src_units):
            index = src_batch * src_units + src_unit
            found = self._nodes.get((edge.src_stage, edge.src, index), ())
            nodes = [node for node, pipe in found if not same_pipe or pipe == atom.pipe]
            if not nodes and self.program.semantics != "partial":
                raise ScheduleError(f"{atom.text} waits for {edge.src_stage}{edge.src}{index}, which no lane performs")
            yield from nodes

    def order(self) -> list[int]:
        """Nodes in topological order, breadth first, so lanes advance evenly.

        Raises:
            ScheduleError: there is none; the message names the cycle.
        """
        missing = [len(predecessors) for predecessors in self.predecessors]
        successors: list[list[int]] = [[] for _ in self.actions]
        for node, predecessors in enumerate(self.predecessors):
            for predecessor in predecessors:
                successors[predecessor.node].append(node)
        ready = [node for node, count in enumerate(missing) if count == 0]
        order: list[int] = []
        for node in ready:  # grows while it is walked: breadth first
            order.append(node)
            for successor in successors[node]:
                missing[successor] -= 1
                if missing[successor] == 0:
                    ready.append(successor)
        if len(order) < len(self.actions):
            raise ScheduleError(f"deadlock: {self._spell_cycle(missing)}")
        return order

    def _spell_cycle(self, missing: list[int]) -> str:
        """``0X_FETCH1 waits for 0X_WRITEBACK1 waits for … waits for 0X_FETCH1``. Nodes with missing > 0 hold a cycle.

        The shortest cycle through some node, without the actions between two actions of one lane.
        """
        node = next(node for node, count in enumerate(missing) if count)
        seen: set[int] = set()
        while node not in seen:
            seen.add(node)
            node = next(p.node for p in self.predecessors[node] if missing[p.node])
        cycle = self._shortest_cycle(node, missing)
        in_lane = [self.lane_before[n] == source for n, source in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]
        turns = [n for position, n in enumerate(cycle) if not (in_lane[position - 1] and in_lane[position])]
        return " waits for ".join(self.actions[n].text for n in [*turns, turns[0]])

    def _shortest_cycle(self, start: int, missing: list[int]) -> list[int]:
        """A cycle from waiter to predecessor, beginning at `start`, which lies on one."""
        came_from: dict[int, int] = {}
        reached = [start]
        for node in reached:  # grows while it is walked: breadth first
            for predecessor in self.predecessors[node]:
                if missing[predecessor.node] and predecessor.node not in came_from:
                    came_from[predecessor.node] = node
                    reached.append(predecessor.node)
        path = [came_from[start]]
        while path[-1] != start:
            path.append(came_from[path[-1]])
        return path[::-1]


def _source_batch(edge: Edge, batch: int, hazards: Hazards) -> int:
    """The batch of `edge.src` that batch `batch` of `edge.dst` waits for; negative: none."""
    if edge.kind == "hazard" and edge.hazard in hazards:
        source = hazards[edge.hazard](batch)
        if source > batch:
            raise ScheduleError(f"hazard {edge.hazard} makes batch {batch} wait for the later batch {source}")
        return source
    return -1 if edge.delay is None else batch - edge.delay
