"""Staging memory on the host for asynchronous copies to and from a device. No thread waits for a copy.

    to the device    StagingRing.take() ─> Area ─fill─> one copy, enqueued ─> area.copied = event     reused in turn
    from the device  HostCopy(tensor): its own memory, the copy enqueued, an event                    used once
                     HostCopies(tensors): several tensors in one block of memory, with one event
    on one device    Scratch: a buffer that each batch reuses

Rules of this file: *an area is filled only after its last copy*, and *the holder of a copy owns its memory*. A ring has
one area per batch in flight, so the wait for an area's event normally ends immediately. Areas grow to the size of a
batch and never shrink. Memory of copies from the device comes from a pool of the streams and returns to it when
released: the rows of a batch can go to the store and to a checkpoint's journal, and the latter has no schedule.
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
    "PendingTensor",
    "PendingTensors",
    "Scratch",
    "StagingRing",
    "aligned_bytes",
    "copy_to_host",
    "empty_view",
    "to_host",
]

#: Alignment of tensors in an area, equal to that of torch's device allocator: torch selects matrix kernels by operand
#: alignment, and results must not depend on the upload path.
ALIGN_BYTES = 512

#: Granularity of area sizes, so that batches of similar size need the same area.
_STEP_BYTES = 1 << 20


class Area:
    """One block of staging memory.

    Attributes:
        memory: uint8 ``[num_bytes]``, on the host.
        copied: event after the latest copy from it; None: no copy is pending.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.copied: Event | None = None

    def __len__(self) -> int:
        return len(self.memory)


class StagingRing:
    """Areas used in turn by one lane, or under one lock.

    Args:
        streams: streams of the device.
        num_areas: number of areas: the maximal number of batches in flight.

    Attributes:
        num_waits: number of times `take` had to wait for a copy.
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
        """Bytes of host memory of all areas."""
        return sum(len(area) for area in self._areas if area is not None)

    def take(self) -> Area:
        """The next area, after its last copy. Its size is the maximum that batches have needed so far."""
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
        """Record that a batch needed `num_bytes`. Areas taken later have a quarter more."""
        if num_bytes > self._area_bytes:
            self._area_bytes = -(-(num_bytes + num_bytes // 4) // _STEP_BYTES) * _STEP_BYTES


class PendingTensor(Protocol):
    """A tensor on its way to the host."""

    def is_ready(self) -> bool:
        """Whether `get` returns without waiting."""
        ...

    def get(self) -> Tensor:
        """The tensor in host memory; waits for the copy."""
        ...


class _HostTensor:
    """A tensor that is on the host already. Not a copy: writes to the tensor are visible."""

    def __init__(self, streams: Streams, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def is_ready(self) -> bool:
        return True

    def get(self) -> Tensor:
        return self._tensor


class HostCopy:
    """A copy of a device tensor, enqueued on the current stream. Later work on that stream can change the tensor."""

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


_TO_HOST: dict[bool, type[_HostTensor] | type[HostCopy]] = {False: _HostTensor, True: HostCopy}


def to_host(streams: Streams, tensor: Tensor) -> PendingTensor:
    """Start copying a tensor to the host, without waiting. On a CPU nothing is copied."""
    return _TO_HOST[streams.is_async](streams, tensor)


class PendingTensors(Protocol):
    """Copies of tensors on their way to the host, with the values as of the call of `copy_to_host`."""

    def order(self) -> None:
        """Make later work on the current stream wait for the copies."""
        ...

    def get(self) -> Mapping[str, Tensor]:
        """The copies by name, contiguous, in host memory; waits for them."""
        ...


class _HostTensors:
    """Copies made synchronously."""

    def __init__(self, streams: Streams, tensors: Mapping[str, Tensor]) -> None:
        self._host = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    def order(self) -> None:
        """No-op: the copies are complete."""

    def get(self) -> Mapping[str, Tensor]:
        return self._host


class HostCopies:
    """Copies of device tensors, enqueued on the current stream, in one block of memory; see `HostCopy`.

    Tensors on the host, such as an optimizer's step counts, are copied synchronously.
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
    """Start copying named tensors to the host, without waiting. On a CPU the copies are synchronous."""
    return _COPY_TO_HOST[streams.is_async](streams, tensors)


def aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor in an area, rounded up to `ALIGN_BYTES`."""
    return -(-prod(shape) * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES


def empty_view(memory: Tensor, first_byte: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A view of uint8 `memory` from `first_byte`, as a tensor of `shape` and `dtype`."""
    num_bytes = prod(shape) * dtype.itemsize
    return memory[first_byte : first_byte + num_bytes].view(dtype).view(shape)


class Scratch:
    """A buffer that every batch reuses: page faults of fresh memory cost more than the copies into it.

    One owner, one use at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """``[num_rows, width]`` of `dtype`, contents undefined. Invalidates the tensor taken before."""
        num_bytes = num_rows * width * dtype.itemsize
        if num_bytes > len(self._buffer):
            self._buffer = self._buffer.new_empty(num_bytes + num_bytes // 4)  # batch sizes vary
        return empty_view(self._buffer, 0, (num_rows, width), dtype)
