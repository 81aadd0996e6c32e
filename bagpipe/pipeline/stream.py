"""Streams and events, and the null object for machines without a device. The only place that knows of CUDA streams.

    lane A (device)  handler enqueues work ──> record() -> Event ─┐
    lane B (device)  wait(Event): B's later work waits, the thread does not
    lane C (host)    wait(Event): the thread waits until A's work is done

A *host* lane's action is done when its handler returns, so it has no events: what its handler gave to the device (index
tensors, model inputs) is waited for. On a CPU every lane is such a lane. Handlers run with their lane's stream current.
What a handler allocates on one stream and another lane's handler uses must be kept alive by the handlers until the
edges between them say it is free, or be given to `keep_for_current_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from bagpipe.errors import InputError
from bagpipe.schedule.program import Resource

__all__ = [
    "CudaStreams",
    "Event",
    "NullStreams",
    "RecordingStreams",
    "Stream",
    "Streams",
    "keep_for_current_stream",
    "open_streams",
]


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the point is done."""
        ...


class Stream(Protocol):
    """One lane's stream. All methods are called by the lane's own thread, except `synchronize`."""

    @property
    def records(self) -> bool:
        """Whether `record` gives events: the lane's actions may return before their work is done."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Makes the stream current in the calling thread."""
        ...

    def record(self) -> Event | None:
        """A point after everything enqueued so far; None when there is nothing to wait for."""
        ...

    def wait(self, event: Event) -> None:
        """The lane's later work starts after the event."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued is done."""
        ...


class Streams(Protocol):
    """Gives every lane its stream."""

    def stream(self, resource: Resource) -> Stream:
        """Called once per lane by the thread that starts the run; the stream follows that thread's current work."""
        ...


class HostStream:
    """The stream of a lane whose actions are done when they return."""

    records = False

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event | None:
        return None

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return None


class NullStreams:
    """No device: every lane is a host lane."""

    def stream(self, resource: Resource) -> Stream:
        return HostStream()


class CudaStreams:
    """One CUDA stream for every lane; ``gpu`` and ``copy`` lanes only enqueue. torch is imported on first use."""

    def __init__(self, device: str) -> None:
        self._device = device

    def stream(self, resource: Resource) -> Stream:
        return _CudaStream(self._device) if resource.on_device else _CudaHostStream(self._device)


class _CudaStream:
    records = True

    def __init__(self, device: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._stream: Any = self._cuda.Stream(device)
        # Parameters and cache rows were initialised on the caller's stream.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def current(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cuda.stream(self._stream)
        return context

    def record(self) -> Event | None:
        # A fresh event each time: re-recording one while another thread waits for it would move the point it means.
        event: Event = self._stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event)

    def synchronize(self) -> None:
        self._stream.synchronize()


class _CudaHostStream(_CudaStream):
    """A host lane beside a device: its uploads are done before its action counts as done."""

    def record(self) -> Event | None:
        self._stream.synchronize()
        return None

    def wait(self, event: Event) -> None:
        event.synchronize()


def keep_for_current_stream(tensor: Any) -> None:
    """The calling lane uses a tensor of another lane's stream: its memory is not given away before that is done."""
    if tensor.is_cuda:
        import torch

        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class RecordingStreams:
    """Device streams for tests, without a device: every call is logged as (lane, what, event name).

    Attributes:
        log: list of ``(lane, "record" | "wait" | "host-wait" | "synchronize", event)`` in the order of the calls;
            events
            are named ``lane#n``.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []  # list.append is atomic

    def stream(self, resource: Resource) -> Stream:
        return _RecordingStream(resource, self.log)


class _RecordedEvent:
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        """A recorded event stands for work that is always done."""


class _RecordingStream:
    def __init__(self, resource: Resource, log: list[tuple[str, str, str]]) -> None:
        self.records = resource.on_device
        self._lane = resource.name
        self._log = log
        self._count = 0

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event | None:
        if not self.records:
            return None
        event = _RecordedEvent(f"{self._lane}#{self._count}")
        self._count += 1
        self._log.append((self._lane, "record", event.name))
        return event

    def wait(self, event: Event) -> None:
        what = "wait" if self.records else "host-wait"
        self._log.append((self._lane, what, getattr(event, "name", "?")))
        event.synchronize()

    def synchronize(self) -> None:
        self._log.append((self._lane, "synchronize", ""))


_BY_DEVICE: Mapping[str, Callable[[str], Streams]] = {
    "cpu": lambda device: NullStreams(),
    "cuda": CudaStreams,
}


def open_streams(device: str) -> Streams:
    """The streams of a device named as torch does: cpu, cuda or cuda:N.

    Raises:
        InputError: no such kind of device.
    """
    kind, _, _ = device.partition(":")
    if kind not in _BY_DEVICE:
        raise InputError(f"run.device must be {' or '.join(_BY_DEVICE)}, got {device!r}")
    return _BY_DEVICE[kind](device)
