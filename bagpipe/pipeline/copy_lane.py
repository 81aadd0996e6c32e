"""`CopyLane`: makes the copies of chunks or activations, in the order in which they are ordered, beside the compute.

    order(to, chunk, target, source) ──queue──> thread, on CUDA a stream ──> Order.wait: later work finds the bytes

While it is closed, copies are made in the thread that orders them. So no thread is left when a run is over, and an
evaluation after it still finds its chunks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stream import Event, Stream, Streams
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.program import Resource

__all__ = ["COPIES", "CopyLane", "Order"]

#: Direction of a copy -> the operation's name in traces: a chunk comes to the device, or goes home.
COPIES = {"device": "CHUNK_IN", "host": "CHUNK_OUT"}


@dataclass(slots=True, eq=False)
class Order:
    """A move that the lane makes, or has made.

    Attributes:
        lane: of the move.
        to: where the chunk goes.
        future: gives the event after the copy.
        event: after the copy, once it was waited for; None: the copy is done when its call returns.
    """

    lane: CopyLane
    to: str
    future: Future[Event | None]
    event: Event | None = None

    def wait(self, stream: Stream) -> None:
        """Have the stream's later work follow the move."""
        if not self.future.done():
            start_ns = time.monotonic_ns()
            self.future.result()
            waited_ns = self.lane.waits_ns
            waited_ns[self.to] = waited_ns.get(self.to, 0) + time.monotonic_ns() - start_ns
        self.event = self.future.result()
        if self.event is not None:
            stream.wait(self.event)


@dataclass(slots=True, eq=False)
class CopyLane:
    """See above.

    Args:
        streams: of the device.
        most: moves that are ordered and not made, at most.
        name: of the lane in traces and reports.

    Attributes:
        num_copies, num_bytes: to the device and to the host, so far.
        waits_ns: time in which the thread that computes waited for moves, by their direction.
    """

    streams: Streams
    most: int
    name: str
    num_copies: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COPIES, 0))
    num_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COPIES, 0))
    waits_ns: dict[str, int] = field(default_factory=dict)
    _busy_ns: int = 0
    _trace: Trace | None = None
    _thread: ThreadPoolExecutor | None = None
    _stream: Stream | None = None
    _orders: deque[Order] = field(default_factory=deque)

    def open(self, trace: Trace | None = None) -> None:
        """Make copies in a thread, until `close`.

        Args:
            trace: records every copy. On a device its time is that of enqueuing.
        """
        self._trace = trace
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"bagpipe-{self.name}")

    def close(self) -> None:
        """Make what is ordered, and end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    def order(self, to: str, chunk: int, target: Tensor, source: Tensor | None) -> Order:
        """Order a move behind the work that is enqueued so far.

        Args:
            to: ``device`` or ``host``.
            chunk: its number; of activations the micro-batch.
            target, source: uint8 ``[chunk_bytes]``; without a source nothing is copied, and the move only waits.
        """
        while len(self._orders) >= self.most:
            self._orders.popleft().future.result()
        if self._stream is None:
            self._stream = self.streams.stream(Resource(name=self.name, kind="copy"))
        after = self.streams.here().record()
        if self._thread is None:
            future: Future[Event | None] = Future()
            future.set_result(self._copy(to, chunk, self._stream, after, target, source))
        else:
            future = self._thread.submit(self._copy, to, chunk, self._stream, after, target, source)
        order = Order(self, to, future)
        self._orders.append(order)
        return order

    def settle(self) -> None:
        """Wait until every move that is ordered is made."""
        while self._orders:
            order = self._orders.popleft()
            order.wait(self.streams.here())
            if order.event is not None:
                order.event.synchronize()

    def reports(self, computing: str) -> Mapping[str, LaneReport]:
        """The lane so far, and what is to be added to the report of the lane that computes: waits inside its handlers.

        Args:
            computing: name of that lane.
        """
        waits_s = {COPIES[to]: ns / 1e9 for to, ns in dict(self.waits_ns).items()}
        wait_s = sum(waits_s.values())
        return {
            self.name: LaneReport(
                busy_s=self._busy_ns / 1e9,
                wait_s=0.0,
                waits_s={},
                actions=sum(self.num_copies.values()),
                num_bytes=sum(self.num_bytes.values()),
            ),
            computing: LaneReport(busy_s=-wait_s, wait_s=wait_s, waits_s=waits_s, actions=0),
        }

    def _copy(
        self, to: str, chunk: int, stream: Stream, after: Event | None, target: Tensor, source: Tensor | None
    ) -> Event | None:
        with stream.current():
            if after is not None:
                stream.wait(after)
            if source is None:
                return stream.record()
            start_ns = time.monotonic_ns()
            target.copy_(source, non_blocking=True)
            event = stream.record()
        end_ns = time.monotonic_ns()
        self._busy_ns += end_ns - start_ns
        self.num_copies[to] += 1
        self.num_bytes[to] += source.nbytes
        if self._trace is not None:
            self._trace.note(self.name, COPIES[to], chunk, start_ns, end_ns, f"{source.nbytes} bytes")
        return event
