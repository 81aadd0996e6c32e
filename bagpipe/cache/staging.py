"""Staging: host memory that a device copies from and to by itself, so that no thread waits for a copy.

    to the device    StagingRing.take() ─> Area ─filled─> one copy, enqueued ─> area.sent(event)     used in turn
    from the device  HostCopy(tensor): memory of its own, the copy enqueued, an event                 used once
                     HostCopies(tensors): the same for many, in one chunk of memory, with one event

Rules of this file: *an area is filled only when its last copy is done*, and *a copy's memory is its holder's*. Rings
are as long as the schedule lets batches be under way, so the wait for an area's event is over before it begins: it is
there for whoever uses a ring otherwise. Areas grow to what a batch needs, and stay. Memory for copies from the device
is from the streams, which give it again when nobody holds it: a batch's rows may be on their way to the store and into
a checkpoint's journal at once, and the latter has no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from bagpipe.pipeline.stream import Event, Streams

__all__ = [
    "ALIGN_BYTES",
    "Area",
    "HostCopies",
    "HostCopy",
    "HostTensor",
    "PendingTensor",
    "PendingTensors",
    "Scratch",
    "StagingRing",
    "aligned_bytes",
    "copy_to_host",
    "empty_view",
    "to_host",
]

#: Tensors begin at multiples of this in an area, as those that torch allocates on a device do: matrix kernels are
#: chosen by where their operands begin, and results must not depend on how a batch came here.
ALIGN_BYTES = 512

#: Areas grow in steps of this, so that batches of about one size need about one size.
_STEP_BYTES = 1 << 20


class Area:
    """One chunk of staging memory.

    Attributes:
        memory: uint8 ``[num_bytes]``, on the host.
        copied: after the latest copy out of it; None: there was none.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: Event | None = None

    def __len__(self) -> int:
        return len(self.memory)


class StagingRing:
    """Areas used in turn by one lane, or under one lock.

    Args:
        streams: of the device.
        num_areas: how many; batches under way at most.

    Attributes:
        num_waits: times an area's copy was not done yet when it was to be filled again.
    """

    def __init__(self, streams: Streams, num_areas: int) -> None:
        if num_areas < 1:
            raise ValueError(f"num_areas must be at least 1, got {num_areas}")
        self.num_waits = 0
        self._streams = streams
        self._areas: list[Area | None] = [None] * num_areas
        self._next = 0
        self._area_bytes = _STEP_BYTES

    @property
    def num_bytes(self) -> int:
        """Host memory of all areas."""
        return sum(len(area) for area in self._areas if area is not None)

    def take(self) -> Area:
        """The next area, free to be filled. Its size is what batches have needed so far."""
        number, self._next = self._next, (self._next + 1) % len(self._areas)
        area = self._areas[number]
        if area is not None and area.copied is not None:
            if not area.copied.query():
                self.num_waits += 1
                area.copied.synchronize()
            area.copied = None
        if area is None or len(area) < self._area_bytes:
            self._areas[number] = area = Area(self._streams.memory(self._area_bytes))
        return area

    def need(self, num_bytes: int) -> None:
        """A batch needed so many bytes: areas taken from now on have them, and a quarter more."""
        if num_bytes > self._area_bytes:
            self._area_bytes = -(-(num_bytes + num_bytes // 4) // _STEP_BYTES) * _STEP_BYTES


class PendingTensor(Protocol):
    """A tensor that comes to the host."""

    def is_ready(self) -> bool:
        """Whether it can be read without waiting."""
        ...

    def get(self) -> Tensor:
        """The tensor, in host memory; blocks until it is there."""
        ...


class HostTensor:
    """A tensor that is on the host already: itself, so it changes if it is written to."""

    def __init__(self, streams: Streams, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def is_ready(self) -> bool:
        return True

    def get(self) -> Tensor:
        return self._tensor


class HostCopy:
    """A copy of a device's tensor, made on the current stream. The tensor may be changed or freed on that stream."""

    def __init__(self, streams: Streams, tensor: Tensor) -> None:
        num_bytes = prod(tensor.shape) * tensor.itemsize
        self._host: Tensor = streams.memory(num_bytes).view(tensor.dtype).view(tensor.shape)
        self._host.copy_(tensor.detach(), non_blocking=True)
        self._copied = streams.here().record()

    def is_ready(self) -> bool:
        return self._copied is None or self._copied.query()

    def get(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


_TO_HOST: dict[bool, type[HostTensor] | type[HostCopy]] = {False: HostTensor, True: HostCopy}


def to_host(streams: Streams, tensor: Tensor) -> PendingTensor:
    """Bring a tensor to the host; nothing waits, and on a CPU nothing is copied."""
    return _TO_HOST[streams.is_async](streams, tensor)


class PendingTensors(Protocol):
    """Copies of tensors that come to the host: they hold what the tensors held when they were asked for."""

    def order(self) -> None:
        """What the current stream does from now on comes after the copying."""
        ...

    def get(self) -> Mapping[str, Tensor]:
        """The copies by name, contiguous, in host memory; blocks until they are there."""
        ...


class _HostTensors:
    """Copies made at once."""

    def __init__(self, streams: Streams, tensors: Mapping[str, Tensor]) -> None:
        self._host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def order(self) -> None:
        """They are made."""

    def get(self) -> Mapping[str, Tensor]:
        return self._host


class HostCopies:
    """Copies of a device's tensors, made on the current stream, in one chunk of memory; see `HostCopy`.

    Tensors that are on the host all the same, such as an optimizer's counts of steps, are copied at once.
    """

    def __init__(self, streams: Streams, tensors: Mapping[str, Tensor]) -> None:
        sizes = [aligned_bytes(tensor.shape, tensor.dtype) for tensor in tensors.values()]
        *firsts, num_bytes = accumulate(sizes, initial=0)
        memory = streams.memory(num_bytes)
        self._streams = streams
        self._host: dict[str, Tensor] = {}
        for (name, tensor), first in zip(tensors.items(), firsts, strict=True):
            self._host[name] = empty_view(memory, first, tuple(tensor.shape), tensor.dtype)
            self._host[name].copy_(tensor.detach(), non_blocking=True)
        self._copied = streams.here().record()

    def order(self) -> None:
        if self._copied is not None:
            self._streams.here().wait(self._copied)

    def get(self) -> Mapping[str, Tensor]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


_COPY_TO_HOST: dict[bool, type[_HostTensors] | type[HostCopies]] = {False: _HostTensors, True: HostCopies}


def copy_to_host(streams: Streams, tensors: Mapping[str, Tensor]) -> PendingTensors:
    """Copy tensors of a device, or of the host, by name; nothing waits. On a CPU the copies are made at once."""
    return _COPY_TO_HOST[streams.is_async](streams, tensors)


def aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor in an area, up to where the next may begin."""
    return -(-prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def empty_view(memory: Tensor, first_byte: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of `shape` and `dtype` that begins at a byte of uint8 `memory`."""
    num_bytes = prod(shape) * dtype.itemsize
    return memory[first_byte : first_byte + num_bytes].view(dtype).view(shape)


class Scratch:
    """A buffer used again by every batch: fresh memory of many megabytes costs more in page faults than in copying.

    One owner, one use at a time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, num_rows: int, width: int) -> Tensor:
        """``[num_rows, width]``, contents undefined; what was taken before is no longer valid."""
        size = num_rows * width
        if size > len(self._buffer):
            self._buffer = self._buffer.new_empty(size + size // 4)  # batches differ a little in size
        return self._buffer[:size].view(num_rows, width)
