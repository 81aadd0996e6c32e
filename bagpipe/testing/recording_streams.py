"""`RecordingStreams`: device streams for tests, without a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from bagpipe.pipeline.stream import Event, Mark, Origin, Stream
from bagpipe.schedule.ir.program import Resource

__all__ = ["RecordingStreams"]


class RecordingStreams:
    """Device streams for tests, without a device. Logs every call as (lane, call, event name).

    Work completes immediately, as on a CPU, but the engine treats these streams as device streams.

    Attributes:
        log: list of ``(lane, "record" | "wait" | "host-wait" | "synchronize", event)`` in the order of the calls;
            events are named ``lane#n``. Threads outside lanes are named ``main``.
    """

    is_async = True

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []  # list.append is atomic
        self._local = threading.local()
        self._main = _RecordingStream(Resource(name="main", kind="gpu"), self)

    def stream(self, resource: Resource) -> Stream:
        return _RecordingStream(resource, self)

    def here(self) -> Stream:
        return _Here(getattr(self._local, "stream", self._main))

    def memory(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def origin(self) -> Origin | None:
        return None

    @contextmanager
    def current(self, stream: _RecordingStream) -> Iterator[None]:
        """Make the stream current in the calling thread."""
        before = getattr(self._local, "stream", self._main)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before


@dataclass(frozen=True, slots=True)
class _RecordedEvent:
    """An event whose work is always done."""

    name: str
    holds_threads: bool

    def synchronize(self) -> None:
        """No-op: the work is done."""

    def query(self) -> bool:
        return True


class _RecordingStream:
    records = True

    def __init__(self, resource: Resource, streams: RecordingStreams) -> None:
        self.key: object = resource.name
        self.log = streams.log
        self.on_device = resource.on_device
        self._lane = resource.name
        self._streams = streams
        self._count = 0

    def current(self) -> AbstractContextManager[Any]:
        return self._streams.current(self)

    def record(self) -> Event | None:
        return self.record_for(holds_threads=self.on_device)

    def record_for(self, *, holds_threads: bool) -> Event:
        event = _RecordedEvent(f"{self._lane}#{self._count}", holds_threads)
        self._count += 1
        self.log.append((self._lane, "record", event.name))
        return event

    def mark(self) -> Mark | None:
        return None

    def wait(self, event: Event) -> None:
        holds = not self.on_device and getattr(event, "holds_threads", True)
        self.log.append((self._lane, "host-wait" if holds else "wait", getattr(event, "name", "?")))
        if holds:
            event.synchronize()

    def synchronize(self) -> None:
        self.log.append((self._lane, "synchronize", ""))


class _Here:
    """A recording stream as the current stream of a thread: waits never block the thread."""

    records = True

    def __init__(self, stream: _RecordingStream) -> None:
        self.key = stream.key
        self._stream = stream

    def current(self) -> AbstractContextManager[Any]:
        return self._stream.current()

    def record(self) -> Event | None:
        return self._stream.record_for(holds_threads=True)

    def mark(self) -> Mark | None:
        return None

    def wait(self, event: Event) -> None:
        self._stream.log.append((str(self.key), "wait", getattr(event, "name", "?")))

    def synchronize(self) -> None:
        self._stream.synchronize()
