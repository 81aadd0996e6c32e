"""Device time between events, read at the end; on a CPU, wall time.

    every repeat:   each contestant once ── prepare (not timed) ── flush the device's cache ── time(run)

All contestants see the same state of the machine, and none finds its rows in the device's cache. The flush also lets
the host run ahead, so the time is the device's work and not Python's enqueueing, unless the timed call itself waits
for the device, as torch's sums of sparse gradients do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import torch

__all__ = ["Clock", "Contestant", "interleaved", "median_s", "open_clock"]

#: Written between two timings: many times the largest L2 cache (60 MB on an H200).
FLUSH_BYTES = 1 << 30

#: Number of writes: about a millisecond on an H200, more than Python needs for any contestant's launches.
FLUSHES = 4


class Contestant(Protocol):
    """Something to time."""

    def prepare(self) -> None:
        """Untimed preparation of a run."""
        ...

    def run(self) -> object:
        """The timed work: enqueues it."""
        ...


class Clock(Protocol):
    """Clock of one device. Context manager: at its end the device has finished."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def mark(self) -> Any:
        """A mark in the current stream."""
        ...

    def time(self, run: Callable[[], object]) -> tuple[Any, Any]:
        """The marks before and after `run`."""
        ...

    def seconds(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        """Between the marks of each pair; waits for the device."""
        ...


class _HostClock:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def mark(self) -> Any:
        return time.perf_counter()

    def time(self, run: Callable[[], object]) -> tuple[Any, Any]:
        start = self.mark()
        run()
        return start, self.mark()

    def seconds(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        return [end - start for start, end in pairs]


class _CudaClock(_HostClock):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, pairs: Sequence[tuple[Any, Any]]) -> list[float]:
        torch.cuda.synchronize(self._device)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def open_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return _CudaClock(device) if device.type == "cuda" else _HostClock()


def median_s(times_s: Sequence[float]) -> float:
    return statistics.median(times_s)


def interleaved(
    contestants: Mapping[str, Contestant], device: torch.device, *, repeats: int, warmups: int = 3
) -> dict[str, float]:
    """Median seconds of each contestant's `run`, interleaved, after `warmups` rounds."""
    flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contestants}
    with open_clock(device) as clock:
        for number in range(warmups + repeats):
            for name, contestant in contestants.items():
                contestant.prepare()
                for _ in range(FLUSHES):
                    flush.zero_()
                pair = clock.time(contestant.run)
                if number >= warmups:
                    pairs[name].append(pair)
        return {name: median_s(clock.seconds(found)) for name, found in pairs.items()}
