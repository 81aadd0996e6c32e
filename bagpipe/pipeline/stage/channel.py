"""`Channel`: the tensors of one edge in one direction, micro-batch by micro-batch, within a process or over a link.

    same process    put ──> slots ──> take
    two processes   put ──> outbox ──send──>  link  ──receive──> slots ──> take       (one message per tensor)

A tensor that enters a stage is contiguous and starts its own memory, however it came: kernels sum in an order that
depends on strides and alignment, so otherwise results would depend on who runs where. Messages hold one tensor rather
than all of an edge: each arrives in memory of its own, so nothing is packed, unpacked or copied.

A channel is used by one thread at each end. Taking is counted: a slot is given up when its last user has taken it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.distributed.interface import Pending, StageLinks
from bagpipe.errors import JobError
from bagpipe.pipeline.stage.shares import Piece
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.split.staged_model import StageValue

__all__ = ["Channel", "Link", "owned"]


@dataclass(frozen=True, slots=True)
class Link:
    """The way to the process at the other end.

    Attributes:
        links: of this process.
        process: the other's position in the replica.
        tag: the channel's, the same at both ends.
    """

    links: StageLinks
    process: int
    tag: int


@dataclass(slots=True)
class _Slot:
    """What arrived of one micro-batch: one tensor per value, transfers under way, and users still to come."""

    tensors: list[Tensor]
    pending: list[Pending]
    users: int


class Channel:
    """What a sender gives a receiver.

    Args:
        number: its own among the channels of the process.
        sender, receiver: stage instances or embedding stages.
        pipe: whose examples.
        numbers: of the values, ascending.
        values: the same, described.
        units: micro-batches of the sender in a batch; indices count them over all batches.
        receiver_units: those of the receiver.
        copies: tensors given are parts of larger ones, so takers get copies.
        link: where the other end is another process.
        device: of the tensors.
    """

    def __init__(
        self,
        *,
        number: int,
        sender: int,
        receiver: int,
        pipe: int,
        numbers: tuple[int, ...],
        values: tuple[StageValue, ...],
        units: int,
        receiver_units: int,
        copies: bool,
        link: Link | None,
        device: torch.device,
    ) -> None:
        self.number = number
        self.sender = sender
        self.receiver = receiver
        self.pipe = pipe
        self.numbers = numbers
        self.units = units
        self.receiver_units = receiver_units
        self.link = link
        self._values = values
        self._copies = copies
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._outbox: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[tuple[Pending, Tensor]]] = {}

    def put(self, index: int, tensors: list[Tensor], users: int) -> None:
        """Give one micro-batch: one tensor per value, contiguous; `users` micro-batches of the receiver take of it."""
        if self.link is None:
            self._slots[index] = _Slot(tensors, [], users)
        else:
            self._outbox[index] = tensors

    def take(self, base: int, pieces: Sequence[Piece]) -> list[Tensor]:
        """One tensor per value, made of the pieces of micro-batches ``base + unit``. Waits for what is under way."""
        if len(pieces) == 1:
            piece = pieces[0]
            tensors = self._use(base + piece.unit)
            if piece.whole and not self._copies:
                return tensors
            return [_copy(tensor[piece.first : piece.end]) for tensor in tensors]
        parts = [[tensor[p.first : p.end] for tensor in self._use(base + p.unit)] for p in pieces]
        return [torch.cat(column) for column in zip(*parts, strict=True)]

    def _use(self, index: int) -> list[Tensor]:
        slot = self._slots[index]
        for pending in slot.pending:
            pending.wait()
        slot.pending = []
        slot.users -= 1
        if not slot.users:
            del self._slots[index]
        for tensor in slot.tensors:
            keep_for_current_stream(tensor)
        return slot.tensors

    def send(self, index: int) -> None:
        """Start sending what was put; nothing was for an empty micro-batch. What is sent is kept until `settle`."""
        tensors = self._outbox.pop(index, None)
        if tensors is None:
            return
        link = self._far()
        for tensor, value in zip(tensors, self._values, strict=True):
            if tensor.dtype != value.dtype or tensor.shape[1:] != value.shape:
                raise JobError(
                    f"expected {value.name} as {value.dtype} {list(value.shape)} per example, got {tensor.dtype} "
                    f"{list(tensor.shape[1:])}"
                )
        self._sent[index] = [(link.links.send(link.process, link.tag, tensor), tensor) for tensor in tensors]

    def receive(self, index: int, num_examples: int, users: int) -> None:
        """Start receiving a micro-batch of so many examples, at least one."""
        link = self._far()
        tensors = [
            torch.empty((num_examples, *value.shape), dtype=value.dtype, device=self._device) for value in self._values
        ]
        pending = [link.links.receive(link.process, link.tag, tensor) for tensor in tensors]
        self._slots[index] = _Slot(tensors, pending, users)

    def settle(self, index: int) -> None:
        """Wait until a micro-batch has left; at once if the receiver has answered it."""
        for pending, _ in self._sent.pop(index, ()):
            pending.wait()

    def settle_all(self) -> None:
        """Wait until everything has left."""
        for index in list(self._sent):
            self.settle(index)

    def _far(self) -> Link:
        if self.link is None:
            raise JobError(f"{self.sender} and {self.receiver} are in one process: nothing is sent between them")
        return self.link


def owned(tensor: Tensor) -> Tensor:
    """The tensor without its history, contiguous and at the start of its memory; a copy only if it is not."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.storage_offset():
        return tensor
    return _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
