"""Time on a device: events around what was enqueued, read when all is done; on a CPU the clock on the wall.

    every repeat:   each contestant once ── prepare (not timed) ── flush the device's cache ── time(run)

So all contestants meet the same state of the machine, and none finds its rows in the device's cache. The flush also
lets the host run ahead, so that what is timed is the device's work and not how fast Python enqueues it; unless what is
timed waits for the device itself, as sums of sparse gradients do in torch.
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

#: Times that it is written: about a millisecond on an H200, more than Python needs for any contestant's launches.
FLUSHES = 4


class Contestant(Protocol):
    """Something that is timed."""

    def prepare(self) -> None:
        """What comes before, and is not timed."""
        ...

    def run(self) -> object:
        """What is timed: enqueues its work."""
        ...


class Clock(Protocol):
    """Times what is done on one device. A context manager: at its end the device has finished."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def mark(self) -> Any:
        """A point in the current stream's work."""
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
    """Median seconds of each contestant's `run`; each is warmed up first, and all take turns."""
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
