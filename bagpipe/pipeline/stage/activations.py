"""Activations on the host: what the forwards of a lane keep for its backwards leaves the device in between.

    row of the lane    F0       F1       F2       B0       F3       B1          a lane holds one action's activations
    copy lane             out 0    out 1    in 0     out 2    in 1              and those of one move
    on the device      0        1 0      2 0      0 2      3 1      1 3

A micro-batch leaves after its F, while the next action runs; the lane waits for it before the action after that. It
comes back while the action before its B (or I) runs, which the row names; before that the lane waits for what leaves.
A micro-batch whose B follows its F stays, and so does one between I and W. Autograd's saved tensors are moved by
their memory, so tensors that share memory, or are saved twice, move once. Parameters, buffers, and what stages
exchange stay: their neighbours share it. Parameters that others move (`Places`) are saved as these say. A tensor comes
back to memory with the same offset, so kernels see the same alignment and the bits are the same.

Bytes are counted from the forward's save to the backward's release, without what is not moved for being a parameter,
a buffer or an input. They follow from the row alone, not from the copies' speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bagpipe.errors import JobError
from bagpipe.pipeline.copy_lane import CopyLane, Order
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.ops import OPS

__all__ = ["LaneActivations", "Placed", "Places", "Saving"]

#: Copies of a lane that are ordered and not made, at most.
_MOST_MOVES = 1024

#: Instance, and micro-batch counted over all batches.
_Key: TypeAlias = tuple[int, int]

_COMPUTE = ("forward", "backward", "input_grad", "weight_grad")


@dataclass(slots=True, eq=False)
class _Bytes:
    """Bytes on the device, and the most so far. Autograd's threads release some."""

    now: int = 0
    peak: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)  # garbage collected inside `add` adds too

    def add(self, change: int) -> None:
        with self.lock:
            self.now += change
            self.peak = max(self.peak, self.now)


class _Block:
    """The memory of saved tensors, on the device, on the host, or on its way. Autograd's graph keeps it alive."""

    __slots__ = ("_bytes", "_home", "coming", "device", "host", "leaving", "num_bytes")

    def __init__(self, tensor: Tensor, meter: _Bytes) -> None:
        memory = tensor.untyped_storage()
        self.num_bytes = memory.nbytes()
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        self.host: Tensor | None = None
        self.leaving: Order | None = None
        self.coming: Order | None = None
        self._bytes = meter
        self._home = tensor.device
        meter.add(self.num_bytes)

    def __del__(self) -> None:
        if self.device is not None:
            self._bytes.add(-self.num_bytes)

    def leave(self, lane: CopyLane, index: int) -> None:
        """Order a copy to the host."""
        assert self.device is not None, "it leaves once"
        self.host = lane.streams.memory(self.num_bytes)
        self.leaving = lane.order("host", index, self.host, self.device)

    def left(self, lane: CopyLane) -> None:
        """The copy to the host is made: free the device's memory. Nothing if it is free."""
        if self.leaving is not None:
            self.leaving.wait(lane.streams.here())
            self.leaving, self.device = None, None
            self._bytes.add(-self.num_bytes)

    def come(self, lane: CopyLane, index: int) -> None:
        """Order a copy back. Nothing if it is on the device."""
        if self.host is not None:
            self.left(lane)
            # The memory belongs to the lane that computes, which waits for the copy before it reads or frees it.
            self.device = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._home)
            self._bytes.add(self.num_bytes)
            self.coming, self.host = lane.order("device", index, self.device, self.host), None

    def arrived(self, lane: CopyLane) -> None:
        """Later work of the current stream finds the memory on the device."""
        if self.coming is not None:
            self.coming.wait(lane.streams.here())
            self.coming = None


@dataclass(slots=True, eq=False)
class _Saved:
    """A saved tensor.

    Attributes:
        block: its memory; None: it stays.
        tensor: as saved, while the forward runs or if it stays.
        version: of its values when it was saved.
        dtype, shape, stride, offset: of the tensor.
    """

    block: _Block | None
    tensor: Tensor | None
    version: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_stale: bool = False

    def get(self) -> Tensor:
        """The tensor, on the device."""
        if self.is_stale or (self.tensor is not None and self.tensor._version != self.version):
            raise JobError(
                f"a tensor of shape {list(self.shape)} that the backward needs was changed in place after it was saved"
            )
        if self.tensor is not None:
            return self.tensor
        assert self.block is not None, "what has no block stays"
        memory = self.block.device
        if memory is None:
            raise JobError("a backward reads activations that did not come back from the host")
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)

    def settle(self, *, stays: bool) -> None:
        """The forward is over: forget the tensor unless it stays, so that its memory can be freed."""
        if self.tensor is not None and not stays:
            self.is_stale = self.tensor._version != self.version
            self.tensor = None


class Placed(Protocol):
    """A tensor that comes and goes, saved as its place."""

    def get(self) -> Tensor:
        """The tensor, on the device."""
        ...


class Places(Protocol):
    """Of tensors that somebody else moves."""

    def place(self, tensor: Tensor) -> Placed | None:
        """What is saved of a tensor; None: it is none of them."""
        ...


class Saving:
    """Hooks for one forward: with them, tensors are saved in blocks.

    Args:
        meter: counts the bytes.
        kept: tensors that stay where they are.
        places: of parameters that others move, which are saved as places; None: they stay where they are.
    """

    def __init__(self, meter: _Bytes, kept: Iterable[Tensor], places: Places | None = None) -> None:
        self._places = places
        self.blocks: dict[int, _Block] = {}
        self._meter = meter
        self._saved: list[_Saved] = []
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept} | {0}
        self._hooks = saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self) -> Saving:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def end(self, outputs: Iterable[Tensor]) -> list[_Block]:
        """The forward is over. The blocks that can leave: not those of `outputs`, which others share."""
        shared = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        staying = {id(block) for memory, block in self.blocks.items() if memory in shared}
        for saved in self._saved:
            saved.settle(stays=saved.block is None or id(saved.block) in staying)
        found = [block for memory, block in self.blocks.items() if memory not in shared]
        self._saved, self.blocks = [], {}
        return found

    def unpack(self, packed: _Saved | Placed) -> Tensor:
        """The tensor, on the device."""
        return packed.get()

    def pack(self, tensor: Tensor) -> _Saved | Placed:
        """Keep a tensor in a block, or where it is, or as those who move it say."""
        place = None if self._places is None else self._places.place(tensor)
        if place is not None:
            return place
        own = tensor.detach()  # not the tensor itself, which can own the graph that keeps what is saved
        saved = _Saved(None, own, own._version, own.dtype, tuple(own.shape), own.stride(), 0)
        if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg():
            memory = tensor.untyped_storage().data_ptr()
            if memory not in self._kept:
                saved.offset = int(tensor.storage_offset())
                block = self.blocks.get(memory)
                if block is None:
                    block = self.blocks[memory] = _Block(own, self._meter)
                saved.block = block
        self._saved.append(saved)
        return saved


class LaneActivations:
    """What the actions of one compute lane keep. The lane's thread calls all methods.

    Args:
        name: of the lane that copies, in traces and reports.
        row: actions of the lane in one batch, or in one turn: then some are of the batch after.
        units: micro-batches per batch, by instance.
        streams: of the device.
        moves: to the host; otherwise bytes are only counted.

    Attributes:
        lane: makes the copies.
        places: see `Saving`; where a forward has none of its own.
    """

    def __init__(
        self,
        name: str,
        row: Sequence[Template],
        units: Mapping[int, int],
        *,
        streams: Streams,
        moves: bool = True,
    ) -> None:
        self.lane = CopyLane(streams, _MOST_MOVES, name)
        self._units = units
        self._moves = moves
        self.places: Places | None = None
        self._bytes = _Bytes()
        self._blocks: dict[_Key, list[_Block]] = {}
        self._leaving: list[_Block] = []
        self._fresh: list[_Block] = []  # those that the action before orders to leave
        computed = [each for each in row if each.op == "REC" or OPS[each.op].role in _COMPUTE]
        #: Op, instance and micro-batch of an action -> the backward that follows it, if one does: its instance and
        #: micro-batch, and how many batches later it is.
        self._next = {
            (one.op, one.stage, one.unit): (two.stage, two.unit, two.offset - one.offset)
            for one, two in pairwise(computed)
            if OPS[two.op].role in ("backward", "input_grad")
        }

    @property
    def peak_bytes(self) -> int:
        """Most bytes of activations on the device so far."""
        return self._bytes.peak

    def before(self, op: str, number: int, handler: Callable[[int], None]) -> Callable[[int], None]:
        """The handler of an action, with the moves around it."""

        def run(index: int) -> None:
            self._begin(op, number, index)
            handler(index)

        return run

    def saving(self, module: nn.Module, inputs: Iterable[Tensor], places: Places | None = None) -> Saving:
        """Hooks for a forward of a module, whose parameters, buffers and inputs stay, other weights among them; see
        `Saving`."""
        return Saving(self._bytes, [*_tensors_of(module), *inputs], self.places if places is None else places)

    def saved(self, number: int, index: int, saving: Saving, outputs: Iterable[Tensor]) -> None:
        """A forward is over: what it kept leaves, unless its backward is next."""
        blocks = saving.end(outputs)
        unit = index % self._units[number]
        if not self._moves or self._next.get(("F", number, unit)) == (number, unit, 0):
            return
        self._blocks[number, index] = blocks
        for block in blocks:
            block.leave(self.lane, index)
        self._fresh += blocks

    def _begin(self, op: str, number: int, index: int) -> None:
        """Before an action: what left before the last one is gone, the next backward's comes, its own is there."""
        batch, unit = divmod(index, self._units[number])
        self._free(self._leaving)
        self._leaving, self._fresh = self._fresh, []
        if OPS[op].role in ("backward", "input_grad"):
            self._bring(number, index)
            for block in self._blocks.pop((number, index), ()):
                block.arrived(self.lane)
        if (following := self._next.get((op, number, unit))) is not None:
            other, next_unit, later = following
            self._bring(other, (batch + later) * self._units[other] + next_unit)

    def _bring(self, number: int, index: int) -> None:
        blocks = self._blocks.get((number, index), ())
        if any(block.host is not None for block in blocks):
            self._free(self._leaving)
            self._leaving = []
            for block in blocks:
                block.come(self.lane, index)

    def _free(self, blocks: Iterable[_Block]) -> None:
        for block in blocks:
            block.left(self.lane)


def _tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """Parameters, buffers, and tensors that modules keep as attributes."""
    for part in module.modules():
        yield from (each for each in (*part._parameters.values(), *part._buffers.values()) if each is not None)
        yield from (each for each in vars(part).values() if isinstance(each, Tensor))
