"""`DeviceTimes`: when a lane's actions ran on the device, as spans of the trace beside the host's.

    action ──begin()──> mark   enqueued work   mark <──note(name, index)──     after the run: resolve() ──> spans

The host's span of an action is the time to enqueue it; its wait for another lane's event is the stream's, and not seen
there at all. Here an action's span begins when the stream has done everything before it and has waited for what the
action needs, and ends when the action's own work is done: gaps between spans are waits. Times are placed on the
trace's clock by one point of which both are known, and carried on from mark to mark, so that a long run loses nothing
to the resolution of a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.pipeline.stream import Mark, Origin, Stream
from bagpipe.pipeline.trace import Trace, device_lane

__all__ = ["DeviceTimes", "NoTimes"]

#: Actions of a lane whose times are kept: each holds two events until the run is over.
_CAPACITY = 20_000

#: Marks from one that others are placed by to the next.
_STRIDE = 256


class NoTimes:
    """In the place of `DeviceTimes` where nobody asks."""

    def begin(self) -> None:
        """An action begins."""

    def note(self, name: str, index: int) -> None:
        """It has been enqueued."""

    def resolve(self) -> None:
        """The run is over."""


@dataclass(frozen=True, slots=True)
class _Timed:
    name: str
    index: int
    start: Mark
    end: Mark


class DeviceTimes(NoTimes):
    """One lane's. All calls from the lane's thread, but `resolve`, which comes when its stream is done.

    Args:
        trace: gets the spans, in a lane of their own: ``compute (device)``.
        lane: the lane's name.
        stream: its stream.
        origin: what places the marks.
        capacity: actions kept; later ones are only those of the host.
    """

    def __init__(self, trace: Trace, lane: str, stream: Stream, origin: Origin, capacity: int = _CAPACITY) -> None:
        self._trace = trace
        self._lane = device_lane(lane)
        self._stream = stream
        self._origin = origin
        self._capacity = capacity
        self._start: Mark | None = None
        self._timed: list[_Timed] = []

    def begin(self) -> None:
        self._start = self._stream.mark() if len(self._timed) < self._capacity else None

    def note(self, name: str, index: int) -> None:
        end = self._stream.mark() if self._start is not None else None
        if self._start is not None and end is not None:
            self._timed.append(_Timed(name, index, self._start, end))

    def resolve(self) -> None:
        base, base_ns = self._origin.mark, float(self._origin.at_ns)
        for number, timed in enumerate(self._timed):
            start_ns = base_ns + timed.start.after_s(base) * 1e9
            end_ns = base_ns + timed.end.after_s(base) * 1e9
            self._trace.note(self._lane, timed.name, timed.index, round(start_ns), round(end_ns), "device")
            if number % _STRIDE == _STRIDE - 1:
                base, base_ns = timed.end, end_ns
        self._timed.clear()
