"""CUDA streams of the lanes, their events, and pinned memory. Gradient sums have a stream of their own.

    device lane   its stream; device lanes wait for its events on the device, host lanes on the host
    host lane     a stream for its uploads; no thread waits for its events on the host

Host threads block in events (`cudaEventBlockingSync`) instead of spinning, because they share the cores with the store
client, data loading and planner. Only `synchronize` synchronises a stream; the runner calls it at the end of a run.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from bagpipe.pipeline.stream import Event, Mark, Origin, Stream
from bagpipe.schedule.ir.program import Resource

__all__ = ["CudaStreams"]


class CudaStreams:
    """One CUDA stream for every lane; ``gpu`` and ``copy`` lanes only enqueue.

    Args:
        device: ``cuda`` or ``cuda:N``.
    """

    is_async = True

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def stream(self, resource: Resource) -> Stream:
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Parameters and cache rows were initialised on the caller's stream.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        return _DeviceLane(stream) if resource.on_device else _HostLane(stream)

    def here(self) -> Stream:
        return _DeviceLane(torch.cuda.current_stream(self._device))

    def memory(self, num_bytes: int) -> torch.Tensor:
        # torch gives a block of pinned memory again when its tensor is gone and the copies from and to it are done.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def origin(self) -> Origin:
        mark = _Mark(torch.cuda.current_stream(self._device))
        mark.event.synchronize()
        return Origin(mark, time.monotonic_ns())


class _Point:
    """An event of a device lane."""

    __slots__ = ("event",)

    def __init__(self, stream: Any) -> None:
        # A fresh event each time: re-recording one while another thread waits for it would move the point it means.
        self.event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())

    def hold(self, stream: Any) -> None:
        """A host lane goes on when the point is reached."""
        self.event.synchronize()


class _Uploads(_Point):
    """An event of a host lane: what the lane leaves on the host is there already, its uploads are for devices."""

    __slots__ = ()

    def hold(self, stream: Any) -> None:
        stream.wait_event(self.event)


class _Mark:
    __slots__ = ("event",)

    def __init__(self, stream: Any) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def after_s(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class _DeviceLane:
    records = True

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.key: object = stream.cuda_stream

    def current(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def record(self) -> Event | None:
        return _Point(self._stream)

    def mark(self) -> Mark | None:
        return _Mark(self._stream)

    def wait(self, event: Any) -> None:
        self._stream.wait_event(event.event)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _HostLane(_DeviceLane):
    def record(self) -> Event | None:
        return _Uploads(self._stream)

    def mark(self) -> Mark | None:
        return None

    def wait(self, event: Any) -> None:
        event.hold(self._stream)
