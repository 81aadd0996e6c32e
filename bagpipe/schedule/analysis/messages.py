"""R4: sends and receives match, in the same order, and lie between producer and consumer of their values.

pairs     between two lanes, sends and receives match in the same order: sufficient for any transport
tags      the same per edge and pipe: sufficient for a transport that matches messages by tag
messages  SEND after the producer of its value, RECV before the consumer, or on another lane with an edge to it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.graph import partner
from bagpipe.schedule.ir.ops import OPS
from bagpipe.schedule.ir.program import Program, overlapping_units, unit_counts, units_per_batch

__all__ = ["misplaced_messages", "unmatched_pairs", "unmatched_tags"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """A message between two lanes, named by its RECV."""

    recv: Action
    sender: str
    receiver: str

    @property
    def pair(self) -> tuple[str, str]:
        return (self.sender, self.receiver)

    @property
    def tag(self) -> tuple[int, str, int | None, int]:
        """The same for all messages of an edge and pipe."""
        return (self.recv.stage, self.recv.op, self.recv.peer, self.recv.pipe)


def _lane_of(program: Program, role: str) -> dict[Action, str]:
    """Lane of every SEND, or of every RECV, in lane order."""
    return {
        atom: lane
        for lane, actions in program.lanes.items()
        for action in actions
        for atom in action.atoms
        if OPS[atom.op].role == role
    }


def unmatched_pairs(program: Program) -> Iterator[str]:
    """R4: between two lanes, sends and receives match in the same order."""
    sends, recvs = _lane_of(program, "send"), _lane_of(program, "recv")
    for send in sends:
        if partner(send) not in recvs:
            yield f"{send.text} has no {partner(send).text}"
            return
    senders = {partner(send): lane for send, lane in sends.items()}
    for recv in recvs:
        if recv not in senders:
            yield f"{recv.text} has no SEND"
            return
    yield from _crossed(program, lambda message: message.pair)


def unmatched_tags(program: Program) -> Iterator[str]:
    """R4 for a transport that matches messages by tag: the same order per edge and pipe."""
    yield from _crossed(program, lambda message: message.tag)


def _crossed(program: Program, channel: Callable[[_Message], object]) -> Iterator[str]:
    """The first message of a channel whose send and receive positions differ."""
    sends, recvs = _lane_of(program, "send"), _lane_of(program, "recv")
    senders = {partner(send): lane for send, lane in sends.items()}
    sent: dict[object, list[_Message]] = defaultdict(list)
    received: dict[object, list[_Message]] = defaultdict(list)
    for order, found in ((senders, sent), (recvs, received)):
        for recv in order:
            if recv in senders and recv in recvs:
                message = _Message(recv=recv, sender=senders[recv], receiver=recvs[recv])
                found[channel(message)].append(message)
    for key, messages in sent.items():
        for a, b in zip(messages, received[key], strict=True):
            if a != b:
                yield f"lane {a.sender} sends for {a.recv.text} when lane {b.receiver} expects {b.recv.text}"
                return


#: Direction of a message -> its producers, its consumers.
_MAKERS: Mapping[str, tuple[str, ...]] = {"F": ("F", "X_EMBED"), "B": ("B", "I")}
_TAKERS: Mapping[str, tuple[str, ...]] = {"F": ("F",), "B": ("B", "I", "X_EMBED_GRAD")}


def misplaced_messages(program: Program) -> Iterator[str]:
    """R4: a SEND follows a producer of its value on the same lane, a RECV precedes all consumers."""
    counts = unit_counts(program.stages)
    lane_of: dict[tuple[int, int, str, int], tuple[str, int]] = {}
    atoms = [
        (lane, position, atom)
        for lane, actions in program.lanes.items()
        for position, action in enumerate(actions)
        for atom in action.atoms
        if atom.index is not None
    ]
    for lane, position, atom in atoms:
        lane_of[atom.stage, atom.pipe, atom.op, atom.index or 0] = (lane, position)
    for lane, position, atom in atoms:
        role = OPS[atom.op].role
        if role not in ("send", "recv"):
            continue
        units = units_per_batch(counts, (atom.stage, atom.op), atom.peer)
        batch, unit = divmod(atom.index or 0, units)
        ends = []
        for op in (_MAKERS if role == "send" else _TAKERS)[atom.op[-1]]:
            others = units_per_batch(counts, (atom.stage, op))
            ends += [
                (op, batch * others + other, lane_of[key])
                for other in overlapping_units(unit, units, others)
                if (key := (atom.stage, atom.pipe, op, batch * others + other)) in lane_of
            ]
        if not ends:
            yield f"{atom.text} has nothing that {'makes' if role == 'send' else 'takes'} its value"
        elif all(other_lane != lane for _, _, (other_lane, _) in ends) and not _feeds(program, atom):
            there = f"{atom.stage}{ends[0][0]}{ends[0][1]} is on {ends[0][2][0]}"
            yield f"lane {lane}: {atom.text} is apart from what {'makes' if role == 'send' else 'takes'} it: {there}"
        for op, index, (other_lane, other_position) in ends:
            if other_lane == lane and (other_position < position) != (role == "send"):
                where = "before" if role == "send" else "after"
                yield f"lane {lane}: {atom.text} comes {where} {atom.stage}{op}{index}"


def _feeds(program: Program, atom: Action) -> bool:
    """Whether an edge leads from a RECV to what takes its value, which can then be on another lane."""
    takers = {(atom.stage, op) for op in _TAKERS[atom.op[-1]]}
    return any(edge.src_key == (atom.stage, atom.op) and edge.dst_key in takers for edge in program.edges)
