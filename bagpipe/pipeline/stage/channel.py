"""`Channel`: tensors of one edge in one direction, per micro-batch, inside a process or over a link.

    same process    put ──> slots ──> take
    two processes   put ──> outbox ──send──>  link  ──receive──> slots ──> take       (one message per tensor)

Every tensor that enters a stage is contiguous and starts at offset 0 of its storage. The summation order of kernels
depends on strides and alignment, so results would otherwise depend on the placement of stages. A message holds one
tensor, so tensors are not packed, unpacked or copied.

One thread uses each end of a channel; another one receives, where RECVs have a lane of their own. A slot counts its
users and is freed after the last `take`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.distributed.interface import Pending, StageLinks
from bagpipe.errors import JobError
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.split.staged_model import StageValue

__all__ = ["Channel", "Link", "MicrobatchSlice", "Wiring", "owned", "take_joined", "take_placed"]


@dataclass(frozen=True, slots=True)
class Link:
    """Link to the process at the other end.

    Attributes:
        links: links of this process.
        process: position of the other process in the replica.
        tag: tag of the channel, equal at both ends.
    """

    links: StageLinks
    process: int
    tag: int


@dataclass(frozen=True, slots=True)
class MicrobatchSlice:
    """Rows of a message.

    Attributes:
        unit: the sender's micro-batch.
        first, end: rows ``[first, end)`` of its message.
        whole: all of the message's rows.
        at: their place in the receiver's micro-batch.
    """

    unit: int
    first: int
    end: int
    whole: bool
    at: int = 0


@dataclass(slots=True)
class _Slot:
    """Tensors of one micro-batch, one per value, with pending transfers and the number of remaining users."""

    tensors: list[Tensor]
    pending: list[Pending]
    users: int


class Channel:
    """Queue of tensors from a sender to a receiver.

    Args:
        number: number of the channel in its process.
        sender, receiver: stage instances or embedding stages.
        pipe: pipe of the examples.
        numbers: numbers of the values, ascending.
        values: descriptions of the values.
        units: micro-batches of the sender per batch; indices count them over all batches.
        receiver_units: micro-batches of the receiver per batch.
        sender_part, receiver_part: (part, parts) of each micro-batch that the ends take.
        copies: the tensors are slices of larger ones, so `take` copies them.
        link: link to the other process; None inside a process.
        device: device of the tensors.
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
        sender_part: tuple[int, int] = (0, 1),
        receiver_part: tuple[int, int] = (0, 1),
    ) -> None:
        self.number = number
        self.sender = sender
        self.receiver = receiver
        self.pipe = pipe
        self.numbers = numbers
        self.units = units
        self.receiver_units = receiver_units
        self.sender_part = sender_part
        self.receiver_part = receiver_part
        self.link = link
        self._values = values
        self._copies = copies
        self._device = device
        self._slots: dict[int, _Slot] = {}
        self._outbox: dict[int, list[Tensor]] = {}
        self._sent: dict[int, list[tuple[Pending, Tensor]]] = {}

    def put(self, index: int, tensors: list[Tensor], users: int) -> None:
        """Add one micro-batch: one contiguous tensor per value. `users` micro-batches of the receiver use it."""
        if self.link is None:
            self._slots[index] = _Slot(tensors, [], users)
        else:
            self._outbox[index] = tensors

    def take(self, base: int, slices: Sequence[MicrobatchSlice]) -> list[Tensor]:
        """One tensor per value, concatenated from slices of micro-batches ``base + unit``. Waits for transfers."""
        if len(slices) == 1:
            part = slices[0]
            tensors = self._use(base + part.unit)
            if part.whole and not self._copies:
                return tensors
            return [_copy(tensor[part.first : part.end]) for tensor in tensors]
        return _joined([self._rows(base, part) for part in slices])

    def _rows(self, base: int, part: MicrobatchSlice) -> list[Tensor]:
        return [tensor[part.first : part.end] for tensor in self._use(base + part.unit)]

    def _use(self, index: int) -> list[Tensor]:
        self.wait_received(index)
        slot = self._slots[index]
        slot.users -= 1
        if not slot.users:
            del self._slots[index]
        for tensor in slot.tensors:
            keep_for_current_stream(tensor)
        return slot.tensors

    def send(self, index: int) -> None:
        """Start sending a micro-batch, if it is not empty. Its tensors are kept until `wait_sent`."""
        tensors = self._outbox.pop(index, None)
        if tensors is None:
            return
        link = self._require_link()
        for tensor, value in zip(tensors, self._values, strict=True):
            if tensor.dtype != value.dtype or tensor.shape[1:] != value.shape:
                raise JobError(
                    f"expected {value.name} as {value.dtype} {list(value.shape)} per example, got {tensor.dtype} "
                    f"{list(tensor.shape[1:])}"
                )
        self._sent[index] = [(link.links.send(link.process, link.tag, tensor), tensor) for tensor in tensors]

    def receive(self, index: int, num_examples: int, users: int) -> None:
        """Start receiving a micro-batch of `num_examples` examples, at least one."""
        link = self._require_link()
        tensors = [
            torch.empty((num_examples, *value.shape), dtype=value.dtype, device=self._device) for value in self._values
        ]
        pending = [link.links.receive(link.process, link.tag, tensor) for tensor in tensors]
        self._slots[index] = _Slot(tensors, pending, users)

    def wait_received(self, index: int) -> None:
        """Wait until a micro-batch that is being received is here."""
        slot = self._slots[index]
        for pending in slot.pending:
            pending.wait()
        slot.pending = []

    def wait_sent(self, index: int) -> None:
        """Wait until a micro-batch is sent. Does not block once the receiver has replied to it."""
        for pending, _ in self._sent.pop(index, ()):
            pending.wait()

    def wait_all_sent(self, end: int) -> None:
        """Wait until all micro-batches before `end` are sent."""
        for index in [index for index in list(self._sent) if index < end]:
            self.wait_sent(index)

    def _require_link(self) -> Link:
        if self.link is None:
            raise JobError(f"{self.sender} and {self.receiver} are in one process: nothing is sent between them")
        return self.link


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Channels of a stage instance, by ascending number of the other end. Those into it are grouped by stage: the parts
    of a stage each send some of the examples.

    Attributes:
        inputs: values from producers.
        outputs: values to consumers.
        output_grads: gradients from consumers.
        input_grads: gradients to producers.
    """

    inputs: tuple[tuple[Channel, ...], ...]
    outputs: tuple[Channel, ...]
    output_grads: tuple[tuple[Channel, ...], ...]
    input_grads: tuple[Channel, ...]


def take_joined(sources: Sequence[tuple[Channel, int, Sequence[MicrobatchSlice]]]) -> list[Tensor]:
    """One tensor per value, from all instances of a stage, in the order of examples. Waits for transfers.

    Args:
        sources: channels with equal values, the first index of the batch, and the slices of each, some of them none.
    """
    present = [source for source in sources if source[2]]
    if len(present) == 1:
        channel, base, slices = present[0]
        return channel.take(base, slices)
    parts = [(part.at, channel, base, part) for channel, base, slices in present for part in slices]
    return _joined([channel._rows(base, part) for _, channel, base, part in sorted(parts, key=lambda each: each[0])])


def take_placed(sources: Sequence[tuple[Channel, int, Sequence[MicrobatchSlice]]], num_examples: int) -> list[Tensor]:
    """`take_joined` of a receiver's micro-batch with `num_examples` examples; zeros for those without a slice."""
    if sum(part.end - part.first for _, _, slices in sources for part in slices) == num_examples:
        return take_joined(sources)
    channel = sources[0][0]
    whole = [
        torch.zeros((num_examples, *value.shape), dtype=value.dtype, device=channel._device)
        for value in channel._values
    ]
    for channel, base, slices in sources:
        for part in slices:
            for tensor, rows in zip(whole, channel._rows(base, part), strict=True):
                tensor[part.at : part.at + len(rows)] = rows
    return whole


def _joined(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def owned(tensor: Tensor) -> Tensor:
    """The detached tensor, contiguous and at storage offset 0. Copies only if necessary."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.storage_offset():
        return tensor
    return _copy(tensor)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
