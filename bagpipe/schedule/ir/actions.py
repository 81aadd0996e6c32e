"""`Action`: one cell of a schedule, with a text form that round-trips exactly.

    text    = part | overlap
    part    = stage op [index] [":" peer] ["@" version] ["~" pipe]          0F1  1SEND_F0  0X_FETCH5  0F3@2  2B1~1
    overlap = "(" part (";" part)+ ")OVERLAP_F_B"                           (0F7;7B3)OVERLAP_F_B

For F, B, I, W, SEND_*, RECV_*, UNSHARD, RESHARD, REDUCE_GRAD and OVERLAP_F_B without a suffix this is the text of
PyTorch's pipelining CSV. Unlike PyTorch's parser, ours matches the whole cell and accepts only canonical text: numbers
are ASCII digits without leading zeros, so ``parse(text).text == text`` for every accepted text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.ops import OPS, Op

__all__ = ["Action", "parse", "torch_reads"]

_OVERLAP = "OVERLAP_F_B"
_NUMBER = r"(?:0|[1-9][0-9]{0,17})"
# Longest names first, so that no op matches as the prefix of another.
_NAMES = "|".join(sorted((name for name in OPS if name != _OVERLAP), key=len, reverse=True))
_PART = re.compile(
    rf"(?P<stage>{_NUMBER})(?P<op>{_NAMES})(?P<index>{_NUMBER})?"
    rf"(?::(?P<peer>{_NUMBER}))?(?:@(?P<version>{_NUMBER}))?(?:~(?P<pipe>[1-9][0-9]{{0,17}}))?"
)
_OVERLAP_CELL = re.compile(rf"\((?P<parts>[^()]+)\){_OVERLAP}")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a lane.

    Attributes:
        stage: stage number; -1 for an overlap, whose parts name theirs.
        op: a name in `OPS`.
        index: micro-batch or batch number, depending on the op's unit; None where the op needs none.
        peer: stage at the other end of the edge, for ops that name one.
        version: weight version used, in asynchronous schedules.
        pipe: the pipe of the action, in schedules with several pipes (replicas in different directions).
        parts: the actions an overlap executes as one.

    Raises:
        ScheduleError: the fields do not fit the op.
    """

    stage: int
    op: str
    index: int | None = None
    peer: int | None = None
    version: int | None = None
    pipe: int = 0
    parts: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        op = OPS.get(self.op)
        if op is None:
            raise ScheduleError(f"unknown op {self.op!r}; known ops: {', '.join(OPS)}")
        problem = _overlap_problem(self) if op.role == "overlap" else _part_problem(self, op)
        if problem:
            raise ScheduleError(f"action {self.text}: {problem}")

    @property
    def text(self) -> str:
        """The cell's text; `parse` is its inverse."""
        if self.parts:
            return f"({';'.join(part.text for part in self.parts)}){self.op}"
        index = "" if self.index is None else str(self.index)
        peer = "" if self.peer is None else f":{self.peer}"
        version = "" if self.version is None else f"@{self.version}"
        pipe = f"~{self.pipe}" if self.pipe else ""
        return f"{self.stage}{self.op}{index}{peer}{version}{pipe}"

    def __str__(self) -> str:
        return self.text

    @property
    def atoms(self) -> tuple[Action, ...]:
        """The parts of an overlap, or the action itself. Dependencies are between atoms."""
        return self.parts or (self,)


def _overlap_problem(action: Action) -> str:
    if len(action.parts) < 2:
        return f"{_OVERLAP} needs at least two parts, got {len(action.parts)}"
    if any(part.parts for part in action.parts):
        return "a part of an overlap cannot be an overlap"
    if (action.stage, action.index, action.peer, action.version, action.pipe) != (-1, None, None, None, 0):
        return "an overlap has no stage, index, peer, version or pipe of its own"
    return ""


def _part_problem(action: Action, op: Op) -> str:
    if action.parts:
        return f"only {_OVERLAP} has parts"
    if action.index is None and not op.index_optional:
        return f"{op.name} needs an index"
    if (action.peer is not None) != op.peer:
        return f"{op.name} needs the peer stage (:n)" if op.peer else f"{op.name} takes no peer stage"
    numbers = (action.stage, action.index or 0, action.peer or 0, action.version or 0, action.pipe)
    if min(numbers) < 0:
        return "stage, index, peer, version and pipe must not be negative"
    return ""


def parse(text: str) -> Action:
    """The action a cell spells.

    Raises:
        ScheduleError: the whole text is not the canonical text of an action.
    """
    cell = _OVERLAP_CELL.fullmatch(text)
    if cell is not None:
        parts = tuple(_parse_part(part) for part in cell["parts"].split(";"))
        return Action(stage=-1, op=_OVERLAP, parts=parts)
    return _parse_part(text)


def _parse_part(text: str) -> Action:
    match = _PART.fullmatch(text)
    if match is None:
        raise ScheduleError(f"expected an action such as 0F1, 1SEND_F0 or 0X_FETCH5, got {text!r}")

    def number(group: str) -> int | None:
        digits = match[group]
        return None if digits is None else int(digits)

    return Action(
        stage=int(match["stage"]),
        op=match["op"],
        index=number("index"),
        peer=number("peer"),
        version=number("version"),
        pipe=number("pipe") or 0,
    )


def torch_reads(action: Action) -> bool:
    """Whether PyTorch's parser reads the action's text as this action. It silently drops our suffixes."""
    return all(OPS[atom.op].torch and atom.version is None and not atom.pipe for atom in action.atoms)
