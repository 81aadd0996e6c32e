"""`DeviceTimes`: device times of a lane's actions, as trace spans beside the host's.

    action ──begin()──> mark   enqueued work   mark <──note(name, index)──     after the run: resolve() ──> spans

The host span of an action covers only its enqueueing and excludes the stream's waits for events. The device span begins
when the stream has finished earlier work and its waits for the action, and ends when the action's work is done. Gaps
between device spans are waits. One origin with both times places the marks on the trace's clock. Marks are measured
from a recent mark, so that the float resolution of time differences does not degrade in a long run.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.pipeline.stream import Mark, Origin, Stream
from bagpipe.pipeline.trace import Trace, device_lane

__all__ = ["DeviceTimes"]

#: Actions recorded per lane. Each holds two events until the end of the run.
_CAPACITY = 20_000

#: Actions between two reference marks.
_STRIDE = 256


@dataclass(frozen=True, slots=True)
class _Timed:
    name: str
    index: int
    start: Mark
    end: Mark


class DeviceTimes:
    """Device times of one lane. The lane's thread calls `begin` and `note`; `resolve` follows when its stream is done.

    Args:
        trace: receives the spans in a separate row: ``compute (device)``.
        lane: the lane's name.
        stream: its stream.
        origin: a mark with its host time.
        capacity: actions recorded; later actions have only host spans.
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
        """Mark the start of an action."""
        self._start = self._stream.mark() if len(self._timed) < self._capacity else None

    def note(self, name: str, index: int) -> None:
        """Mark the end of the action, after it is enqueued."""
        end = self._stream.mark() if self._start is not None else None
        if self._start is not None and end is not None:
            self._timed.append(_Timed(name, index, self._start, end))

    def resolve(self) -> None:
        """Add the spans to the trace, at the end of the run."""
        base, base_ns = self._origin.mark, float(self._origin.at_ns)
        for number, timed in enumerate(self._timed):
            start_ns = base_ns + timed.start.after_s(base) * 1e9
            end_ns = base_ns + timed.end.after_s(base) * 1e9
            self._trace.note(self._lane, timed.name, timed.index, round(start_ns), round(end_ns), "device")
            if number % _STRIDE == _STRIDE - 1:
                base, base_ns = timed.end, end_ns
        self._timed.clear()
