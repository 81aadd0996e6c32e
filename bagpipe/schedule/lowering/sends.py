"""Passes for messages between processes: SEND after the producer of a value, RECV before its consumer.

    edge F(0) -> F(1), lanes a and b on different processes

    a: 0F0 0F1     a: 0F0 0SENDX_F0:1 0F1 0SENDX_F1:1
    b: 1F0 1F1     b: 1RECVX_F0:0 1F0 1RECVX_F1:0 1F1

`add_sends` walks the lanes in turn, one action per round. The SENDs of an action follow it, and the matching RECVs are
appended to what their lanes have so far. All lanes then agree with one order of events in which each RECV follows its
SEND. This rules out deadlock, and both ends see the same sequence. (The placement of PyTorch's pipelining.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import Graph, partner
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Edge, OpKey, Program, overlapping_units

__all__ = ["add_sends", "defer_receives"]

#: Ops whose results pass between processes -> F (an output) or B (a gradient).
_DIRECTIONS: Mapping[str, str] = {"F": "F", "X_EMBED": "F", "I": "B", "B": "B"}
#: Ops that exchange between processes themselves what they wait for.
_EXCHANGES = frozenset({"X_AGREE", "X_KL"})
#: Direction -> step to the next stage of a chain.
_STEPS: Mapping[str, int] = {"F": 1, "B": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    """A data edge between processes, for one pipe of its source."""

    edge: Edge
    receiver: str
    torch_names: bool

    def messages(self, program: Program, atom: Action) -> Iterator[Action]:
        """The SENDs after `atom`, in micro-batches of the sending stage."""
        index = atom.index or 0
        units = program.micro_per_batch.get(atom.stage, 1)
        whole = OPS[atom.op].unit == "batch"
        direction = _DIRECTIONS[self.edge.src]
        adjacent = self.edge.dst_stage == self.edge.src_stage + _STEPS[direction]
        for unit in range(index * units, (index + 1) * units) if whole else (index,):
            if self.torch_names and adjacent:
                yield Action(atom.stage, f"SEND_{direction}", unit, pipe=atom.pipe)
            else:
                yield Action(atom.stage, f"SENDX_{direction}", unit, peer=self.edge.dst_stage, pipe=atom.pipe)


def add_sends(
    program: Program,
    home: Mapping[str, int],
    *,
    torch_names: bool = False,
    cells: Mapping[str, Sequence[Action | None]] | None = None,
    lookup_first: bool = True,
) -> Program:
    """The program with a SEND and a RECV for every value that passes between processes.

    A value is sent once to each consuming stage, in micro-batches of the sending stage. The result of a batch op
    (X_EMBED) is sent in as many messages as its stage has micro-batches, right after it.

    Args:
        program: without SEND and RECV.
        home: lane -> the process that runs it.
        torch_names: SEND_F, RECV_F, SEND_B, RECV_B between stages with adjacent numbers, as in PyTorch's tables;
            otherwise SENDX_F:n and so on.
        cells: the lanes' actions with idle steps (None), which pace the walk; default: no idle steps.
        lookup_first: X_EMBED comes before all RECVs of its lane.

    Raises:
        ScheduleError: a lane has no process, a dependency between processes has no message, or the program deadlocks.
    """
    for lane in program.lanes:
        if lane not in home:
            raise ScheduleError(f"lane {lane} has no process; there are {', '.join(home)}")
    links = _links(program, home, torch_names)
    graph = Graph(program)
    rows = {lane: list((cells or {}).get(lane, actions)) for lane, actions in program.lanes.items()}
    node = dict(zip(rows, graph.first_nodes, strict=True))
    position = dict.fromkeys(rows, 0)
    lowered: dict[str, list[Action]] = {lane: [] for lane in rows}
    done = [False] * len(graph.actions)
    sent: set[Action] = set()

    def take(lane: str, action: Action) -> None:
        done[node[lane]] = True
        node[lane] += 1
        lowered[lane].append(action)
        for send, receiver in _sends(program, links, action):
            if send not in sent:
                sent.add(send)
                lowered[lane].append(send)
                lowered[receiver].append(partner(send))

    def step(lane: str) -> bool:
        """Take the lane's next cell if its dependencies are done."""
        if position[lane] == len(rows[lane]):
            return False
        action = rows[lane][position[lane]]
        if action is not None:
            if not all(done[predecessor.node] for predecessor in graph.predecessors[node[lane]]):
                return False
            take(lane, action)
        position[lane] += 1
        return True

    while sum([step(lane) for lane in rows]):
        pass
    if not all(done):
        graph.order()  # raises with the cycle
    if lookup_first:  # it announces the batch to its lane
        lowered = {lane: sorted(row, key=lambda action: action.op != "X_EMBED") for lane, row in lowered.items()}
    return dataclasses.replace(program, lanes={lane: tuple(row) for lane, row in lowered.items()})


def _links(program: Program, home: Mapping[str, int], torch_names: bool) -> dict[tuple[OpKey, int], list[_Link]]:
    """((stage, op) of an edge's source, pipe) -> the links that leave it."""
    lanes: dict[OpKey, dict[int, str]] = {}
    for lane, actions in program.lanes.items():
        for atom in (atom for action in actions for atom in action.atoms):
            for op in (atom.op, *OPS[atom.op].provides):
                lanes.setdefault((atom.stage, op), {})[atom.pipe] = lane
    links: dict[tuple[OpKey, int], list[_Link]] = {}
    for edge in program.edges:
        receivers = lanes.get(edge.dst_key, {})
        for pipe, sender in lanes.get(edge.src_key, {}).items():
            receiver = receivers.get(pipe) or next(iter(receivers.values()), sender)
            if edge.kind != "data" or home[sender] == home[receiver] or edge.dst in _EXCHANGES:
                continue
            if edge.src not in _DIRECTIONS or edge.delay or edge.src_stage == edge.dst_stage:
                raise ScheduleError(
                    f"edge {edge.text} leads from process {home[sender]} to {home[receiver]}; only outputs and "
                    "gradients pass between processes, to other stages in the same batch"
                )
            link = _Link(edge=edge, receiver=receiver, torch_names=torch_names)
            links.setdefault((edge.src_key, pipe), []).append(link)
    return links


def _sends(
    program: Program, links: Mapping[tuple[OpKey, int], list[_Link]], action: Action
) -> Iterator[tuple[Action, str]]:
    """(SEND, lane of its RECV) of the results of `action`, micro-batch by micro-batch."""
    for atom in action.atoms:
        leaving = [
            link for op in (atom.op, *OPS[atom.op].provides) for link in links.get(((atom.stage, op), atom.pipe), ())
        ]
        for sends in zip(*(link.messages(program, atom) for link in leaving), strict=True):
            yield from zip(sends, (link.receiver for link in leaving), strict=True)


def defer_receives(program: Program, home: Mapping[str, int], *, in_order: bool = True) -> Program:
    """The program with every RECV right before its consumer.

    Of two processes, the lower one receives what is due before it sends to the other, so at least one side of two that
    wait for each other is ready to receive. (PyTorch's rule.)

    Args:
        program: with SEND and RECV.
        home: lane -> the process that runs it.
        in_order: RECVs from one lane keep their order. False is PyTorch's pass, whose tables need a transport that
            matches messages by tag.

    Raises:
        ScheduleError: a RECV has no later consumer, or a SEND or RECV has no partner.
    """
    lane_of = {atom: lane for lane, actions in program.lanes.items() for action in actions for atom in action.atoms}
    sends = [atom for atom in lane_of if OPS[atom.op].role == "send"]
    senders = {partner(send): lane_of[send] for send in sends}
    lanes: dict[str, tuple[Action, ...]] = {}
    for lane, actions in program.lanes.items():
        row: list[Action] = []
        waiting: dict[Action, str] = {}  # RECV -> lane of its SEND
        for action in actions:
            if OPS[action.op].role == "recv":
                if action not in senders:
                    raise ScheduleError(f"{action.text} has no SEND")
                waiting[action] = senders[action]
                continue
            due: list[Action] = []
            if OPS[action.op].role == "send":
                if partner(action) not in lane_of:
                    raise ScheduleError(f"{action.text} has no {partner(action).text}")
                peer = home[lane_of[partner(action)]]
                if home[lane] < peer:
                    due = [recv for recv, sender in waiting.items() if home[sender] == peer]
            for atom in action.atoms:
                due += [recv for recv in waiting if recv not in due and _takes(program, atom, recv)]
            if in_order:
                due = [recv for recv in waiting if recv in due or _is_before(recv, due, waiting)]
            for recv in due:
                del waiting[recv]
            row += [*due, action]
        for recv in waiting:
            raise ScheduleError(f"lane {lane}: nothing behind {recv.text} takes what it receives")
        lanes[lane] = tuple(row)
    return dataclasses.replace(program, lanes=lanes)


def _is_before(recv: Action, due: Sequence[Action], waiting: Mapping[Action, str]) -> bool:
    """Whether a RECV that is due comes from the same lane and after `recv`."""
    order = list(waiting)
    return any(waiting[other] == waiting[recv] and order.index(other) > order.index(recv) for other in due)


#: Direction -> consumers of a RECV.
_TAKERS: Mapping[str, frozenset[str]] = {"F": frozenset({"F"}), "B": frozenset({"B", "I", "X_EMBED_GRAD"})}


def _takes(program: Program, atom: Action, recv: Action) -> bool:
    """Whether `atom` consumes the value of `recv`: same stage and pipe, overlapping shares of the batch."""
    if (atom.stage, atom.pipe) != (recv.stage, recv.pipe) or atom.op not in _TAKERS[recv.op[-1]]:
        return False
    units = program.units_per_batch((atom.stage, atom.op))
    src_units = program.units_per_batch((recv.stage, recv.op), recv.peer)
    batch, unit = divmod(atom.index or 0, units)
    src_batch, src_unit = divmod(recv.index or 0, src_units)
    return batch == src_batch and src_unit in overlapping_units(unit, units, src_units)
