"""Device times: marks become spans on the trace's clock, with bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bagpipe.pipeline.device_times import DeviceTimes
from bagpipe.pipeline.stream import HostStream, Origin
from bagpipe.pipeline.trace import Trace


@dataclass(frozen=True)
class TimedMark:
    """A mark at a known time. Differences have float32 millisecond resolution, as in CUDA."""

    at_s: float

    def after_s(self, earlier: TimedMark) -> float:
        import numpy as np

        return float(np.float32((self.at_s - earlier.at_s) * 1e3)) / 1e3


class TimedStream(HostStream):
    """A stream whose marks are at 3 ms, 4 ms, 6 ms, 7 ms, …: an action takes 1 ms, and the stream then waits 2 ms."""

    def __init__(self) -> None:
        self.num_marks = 0

    def mark(self) -> TimedMark:
        number, self.num_marks = self.num_marks, self.num_marks + 1
        return TimedMark((number // 2 + 1) * 3e-3 + number % 2 * 1e-3)


def test_spans_are_placed_by_the_origin() -> None:
    trace, stream = Trace(), TimedStream()
    times = DeviceTimes(trace, "compute", stream, Origin(TimedMark(1e-3), 5_000_000_000))
    for batch in range(2):
        times.begin()
        times.note("0F", batch)
    assert not len(trace)
    times.resolve()
    assert [(s.lane, s.name, s.start_ns, s.end_ns, s.category) for s in trace.spans()] == [
        ("compute (device)", "0F0", 5_002_000_000, 5_003_000_000, "device"),
        ("compute (device)", "0F1", 5_005_000_000, 5_006_000_000, "device"),
    ]


def test_a_long_run_keeps_its_resolution() -> None:
    """15,000 actions in 45 s: relative to the origin alone, a time would be off by 4 us."""
    trace, stream = Trace(), TimedStream()
    times = DeviceTimes(trace, "compute", stream, Origin(TimedMark(0.0), 0))
    for batch in range(15_000):
        times.begin()
        times.note("0F", batch)
    times.resolve()
    last = list(trace.spans())[-1]
    assert last.end_ns == pytest.approx(15_000 * 3e6 + 1e6, abs=500)


def test_pending_marks_are_bounded() -> None:
    trace, stream = Trace(), TimedStream()
    times = DeviceTimes(trace, "compute", stream, Origin(TimedMark(0.0), 0), capacity=3)
    for batch in range(10):
        times.begin()
        times.note("0F", batch)
    times.resolve()
    assert len(trace) == 3
    assert stream.num_marks == 6


def test_a_lane_without_marks_has_no_device_times() -> None:
    trace = Trace()
    times = DeviceTimes(trace, "data", HostStream(), Origin(TimedMark(0.0), 0))
    times.begin()
    times.note("0X_READ", 0)
    times.resolve()
    assert not len(trace)
