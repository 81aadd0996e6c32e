"""`reshard`: one rank's part in a resharding: tensors in slices, over links between processes.

    own part ──slices──> flat views or copies ──chunks──> links ──> flat slices of the new part ──> tensor
                                                              └──── relayed to the next rank of the route

All receives are posted first, so no sender waits for this rank's own sends. A rank has one send under way at a time:
slices leave in the order of the plan, at the full speed of its port. Bits do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bagpipe.distributed.interface import Pending, StageLinks
from bagpipe.errors import JobError
from bagpipe.schedule.resharding.layouts import Box, Layout
from bagpipe.schedule.resharding.plan import Message, Resharding

__all__ = ["reshard"]


def reshard(
    plan: Resharding,
    part: Tensor | None,
    *,
    rank: int,
    links: StageLinks,
    tag: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor | None:
    """Take part in a resharding. Every rank of both layouts calls it.

    Args:
        plan: the same on all ranks.
        part: this rank's part ``[examples, …]`` or, of a feature split, ``[examples, features]``; None if it has none.
        rank: this rank, as the links number processes.
        links: to the other ranks.
        tag: of the resharding's messages, equal on all ranks; no other transfer between these ranks uses it meanwhile.
        shape: of an example in the whole tensor; its elements are the plan's columns.
        dtype, device: of the tensor.

    Returns:
        The new part, ``[examples, *shape]`` or, of a feature split, ``[examples, features]``; None for a rank that is
        not in the target.

    Raises:
        JobError: the part or the shape is not what the plan expects.
        PeerError: a peer is gone or silent.
    """
    if math.prod(shape) != plan.columns:
        raise JobError(f"expected examples of {plan.columns} elements, got the shape {list(shape)}")
    own = _Part(plan.source, rank, plan.rows, plan.columns)
    new = _Part(plan.target, rank, plan.rows, plan.columns)
    given = _checked(own.box, part, dtype)
    result = None if new.box is None else torch.empty(_sides(new.box), dtype=dtype, device=device)
    if own.box is not None and new.box is not None and given is not None and result is not None:
        _keep(own.box, given, new.box, result)
    slices = [_Slice(each.task.box, own.box, given, new.box, result) for each in plan.broadcasts]
    _transfer(plan.messages(), slices, rank=rank, links=links, tag=tag)
    for each in slices:
        each.place()
    if result is None or plan.target.kind == "features":
        return result
    return result.view(result.shape[0], *shape)


class _Part:
    """The part of a rank in a layout.

    Args:
        layout: the layout.
        rank: the rank.
        rows, columns: of the whole tensor.

    Attributes:
        box: the part; None if the rank is not in the layout.
    """

    def __init__(self, layout: Layout, rank: int, rows: int, columns: int) -> None:
        self.box: Box | None = None
        if rank in layout.ranks:
            self.box = layout.boxes(rows, columns)[layout.ranks.index(rank)]


class _Slice:
    """The slice of one unit task at this rank, flat. It is a view of the part where its elements are consecutive there.

    Args:
        box: the slice.
        own, given: this rank's part; None: it has none.
        new, result: its new part.
    """

    def __init__(self, box: Box, own: Box | None, given: Tensor | None, new: Box | None, result: Tensor | None) -> None:
        self._result: Tensor | None = None
        self._flat: Callable[[], Tensor]
        if own is not None and given is not None and own.contains(box):
            source = given[box.within(own)]
            self._flat = lambda: source.contiguous().view(-1)
        elif new is not None and result is not None and new.contains(box):
            target = result[box.within(new)]
            if target.is_contiguous():
                self._flat = lambda: target.view(-1)
            else:
                self._result = target
                self._flat = lambda: torch.empty(target.numel(), dtype=target.dtype, device=target.device)
        self._buffer: Tensor | None = None

    def elements(self, first: int, end: int) -> Tensor:
        """Elements ``[first, end)``, contiguous."""
        if self._buffer is None:
            self._buffer = self._flat()
        return self._buffer[first:end]

    def place(self) -> None:
        """Copy a received slice into the new part, unless it is a view of it."""
        if self._result is not None and self._buffer is not None:
            self._result.copy_(self._buffer.view(self._result.shape))


def _transfer(messages: Sequence[Message], slices: Sequence[_Slice], *, rank: int, links: StageLinks, tag: int) -> None:
    """Walk the messages: all receives, then the sends, each after the receive that brings its elements."""
    arriving: dict[tuple[int, int], Pending] = {}
    for message in _of(messages, "receiver", rank):
        taken = slices[message.broadcast].elements(message.first, message.end)
        arriving[message.broadcast, message.first] = links.receive(message.sender, tag, taken)
    leaving: Pending | None = None
    for message in _of(messages, "sender", rank):
        relayed = arriving.get((message.broadcast, message.first))
        if relayed is not None:
            relayed.wait()
        if leaving is not None:
            leaving.wait()
        piece = slices[message.broadcast].elements(message.first, message.end)
        leaving = links.send(message.receiver, tag, piece)
    for pending in arriving.values():
        pending.wait()
    if leaving is not None:
        leaving.wait()


def _of(messages: Sequence[Message], end: str, rank: int) -> Iterator[Message]:
    return (message for message in messages if getattr(message, end) == rank)


def _checked(box: Box | None, part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The part as a matrix.

    Raises:
        JobError: it is missing, or of another size or type.
    """
    if box is None:
        return None
    rows, columns = _sides(box)
    if part is None or part.dtype != dtype or part.shape[:1] != (rows,) or part.numel() != rows * columns:
        found = "none" if part is None else f"{part.dtype} {list(part.shape)}"
        raise JobError(f"expected a part of {rows} examples with {columns} elements of {dtype} each, got {found}")
    return part.detach().reshape(rows, columns)


def _keep(own: Box, given: Tensor, new: Box, result: Tensor) -> None:
    """Copy what the rank has of its new part already."""
    both = Box(
        first_row=max(own.first_row, new.first_row),
        end_row=min(own.end_row, new.end_row),
        first_column=max(own.first_column, new.first_column),
        end_column=min(own.end_column, new.end_column),
    )
    if both.elements:
        result[both.within(new)] = given[both.within(own)]


def _sides(box: Box) -> tuple[int, int]:
    return box.end_row - box.first_row, box.end_column - box.first_column
