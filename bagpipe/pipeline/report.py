"""`Report`: times of a run per lane and per batch. Frozen records; seconds unless the name says otherwise."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LaneReport", "Report", "StepTimes", "StepTimesReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReport:
    """Times of one lane.

    Attributes:
        busy_s: time inside handlers. On a device lane, the time to enqueue, not the device's.
        wait_s: time waiting for other lanes. Waits of a device stream are not counted; a trace shows them.
        waits_s: `wait_s` by the op waited for (``0X_INSERT``), in order of first wait.
        actions: number of handler calls.
        num_bytes: bytes that the lane has moved, where it counts them.
    """

    busy_s: float
    wait_s: float
    waits_s: Mapping[str, float]
    actions: int
    num_bytes: int = 0

    def __add__(self, other: LaneReport) -> LaneReport:
        """Sum of two accounts of one lane."""
        ops = dict.fromkeys((*self.waits_s, *other.waits_s))
        return LaneReport(
            busy_s=self.busy_s + other.busy_s,
            wait_s=self.wait_s + other.wait_s,
            waits_s={op: self.waits_s.get(op, 0.0) + other.waits_s.get(op, 0.0) for op in ops},
            actions=self.actions + other.actions,
            num_bytes=self.num_bytes + other.num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimesReport:
    """Times between the ends of consecutive batches. On a device lane, a batch ends when its last action is enqueued.

    Attributes:
        count: number of times; the first batch has none.
        total_s, max_s: over all times.
        sample_ns: int64 nanoseconds, every `stride`-th time, in order.
        stride: 1 until the sample is full, then doubled each time it fills up again.
    """

    count: int
    total_s: float
    max_s: float
    sample_ns: array[int]
    stride: int

    def quantile_s(self, q: float) -> float:
        """Nearest-rank quantile of the sample (q in [0, 1]); 0 if the sample is empty."""
        ordered = sorted(self.sample_ns)
        return ordered[min(len(ordered) - 1, int(q * len(ordered)))] / 1e9 if ordered else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times and counts of a run, finished or in progress.

    Attributes:
        batches: batches whose sink is done.
        wall_s: time since the run began.
        stopped: a stop was requested, and all batches read before it are finished.
        lanes: per lane.
        steps: step times.
        done: finished units per op (``0X_FETCH``).
        peak_waiting: largest number of lanes that waited at the same time.
    """

    batches: int
    wall_s: float
    stopped: bool
    lanes: Mapping[str, LaneReport]
    steps: StepTimesReport
    done: Mapping[str, int]
    peak_waiting: int


class StepTimes:
    """Collects step times in bounded memory: when the sample is full, it drops every other entry and doubles the
    stride.

    Args:
        capacity: entries kept; 65,536 of 8 bytes give any quantile of a run to 0.4 % of its rank.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 2:
            raise ValueError(f"capacity must be at least 2, got {capacity}")
        self._capacity = capacity
        self._sample: array[int] = array("q")
        self._stride = 1
        self._count = 0
        self._total_ns = 0
        self._max_ns = 0
        self._last_ns: int | None = None

    def mark(self, now_ns: int) -> None:
        """Record the end of a batch."""
        if self._last_ns is not None:
            step_ns = now_ns - self._last_ns
            if self._count % self._stride == 0:
                if len(self._sample) == self._capacity:
                    self._sample = self._sample[::2]
                    self._stride *= 2
                if self._count % self._stride == 0:
                    self._sample.append(step_ns)
            self._count += 1
            self._total_ns += step_ns
            self._max_ns = max(self._max_ns, step_ns)
        self._last_ns = now_ns

    def report(self) -> StepTimesReport:
        """Report of the batches so far. Thread-safe."""
        return StepTimesReport(
            count=self._count,
            total_s=self._total_ns / 1e9,
            max_s=self._max_ns / 1e9,
            sample_ns=self._sample[:],
            stride=self._stride,
        )
