"""Interfaces of streams, events and staging memory, and `NullStreams` for machines without a device.

    lane A (device)  handler enqueues work ──> record() -> Event ─┐
    lane B (device)  wait(Event): B's later work waits, the thread does not
    lane C (host)    wait(Event): the thread waits until A's work is done
    lane D (host)    enqueues uploads on a stream of its own; record() -> Event, for device lanes: a host lane that
                     waits for D uses D's host results, and its own stream waits, not its thread

Waiting is transitive: a wait for a lane, direct or through other lanes, includes that lane's uploads. No stream is
synchronised before the end of a run. On a CPU every lane is a host lane, an action is done when its handler returns,
and there are no events. Handlers run with their lane's stream current. Memory allocated on one stream and used by
another lane must be kept alive until the edges between the lanes release it, or be passed to `keep_for_current_stream`.

CUDA streams are in `bagpipe.pipeline.cuda_stream`. All lanes have the same priority: the exchange and row kernels of
one batch compete with the dense step of another, and which should win is left to measurements on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from bagpipe.schedule.ir.program import Resource

__all__ = [
    "Event",
    "Mark",
    "NullStreams",
    "Origin",
    "Stream",
    "Streams",
    "keep_for_current_stream",
]


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work before the point is done."""
        ...

    def query(self) -> bool:
        """Whether the work before the point is done."""
        ...


class Mark(Protocol):
    """A point in a stream's work with a device time, known once the work before it is done."""

    def after_s(self, earlier: Mark) -> float:
        """Seconds since another mark of the same device; both must be done."""
        ...


@dataclass(frozen=True, slots=True)
class Origin:
    """A mark and the monotonic host time at which it was made."""

    mark: Mark
    at_ns: int


class Stream(Protocol):
    """One lane's stream. All methods are called by the lane's own thread, except `synchronize`."""

    @property
    def key(self) -> object:
        """Identifies the stream: equal for all objects of one stream."""
        ...

    @property
    def records(self) -> bool:
        """Whether `record` returns events: actions of the lane can return before their work is done."""
        ...

    def current(self) -> AbstractContextManager[Any]:
        """Make the stream current in the calling thread."""
        ...

    def record(self) -> Event | None:
        """An event after all work enqueued so far; None if there is nothing to wait for."""
        ...

    def mark(self) -> Mark | None:
        """A mark after all work enqueued so far; None if actions are done when they return."""
        ...

    def wait(self, event: Event) -> None:
        """Make the lane's later work wait for the event; see the module for the thread's behaviour."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all enqueued work is done."""
        ...


class Streams(Protocol):
    """Streams of one device, one per lane.

    Attributes:
        is_async: calls only enqueue work, so host memory that they access must be staged (`bagpipe.cache.staging`).
    """

    is_async: bool

    def stream(self, resource: Resource) -> Stream:
        """The stream of a lane. Called once per lane by the thread that starts the run; it follows that thread's
        current work.
        """
        ...

    def here(self) -> Stream:
        """The stream current in the calling thread. Waiting for an event does not block the thread."""
        ...

    def memory(self, num_bytes: int) -> Any:
        """Pinned host memory for asynchronous copies: a uint8 tensor ``[num_bytes]``.

        It is reused only after its tensor is freed and its enqueued copies are done.
        """
        ...

    def origin(self) -> Origin | None:
        """A mark of the current time, a reference for others; None on a CPU. Waits for the calling thread's stream."""
        ...


class HostStream:
    """The stream of a lane whose actions are done when they return."""

    records = False
    key: object = None

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> Event | None:
        return None

    def mark(self) -> Mark | None:
        return None

    def wait(self, event: Event) -> None:
        event.synchronize()

    def synchronize(self) -> None:
        return None


class NullStreams:
    """No device: every lane is a host lane."""

    is_async = False

    def stream(self, resource: Resource) -> Stream:
        return HostStream()

    def here(self) -> Stream:
        return HostStream()

    def memory(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def origin(self) -> Origin | None:
        return None


def _keep_on_cuda(tensor: Any) -> None:
    import torch

    tensor.record_stream(torch.cuda.current_stream(tensor.device))


#: Device type -> function that keeps memory alive for the current stream.
_KEEP: dict[str, Callable[[Any], None]] = {"cuda": _keep_on_cuda}


def keep_for_current_stream(tensor: Any) -> None:
    """Keep a tensor of another lane's stream alive until the current stream has finished its enqueued work."""
    keep = _KEEP.get(tensor.device.type)
    if keep is not None:
        keep(tensor)
