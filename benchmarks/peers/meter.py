"""`Meter`: end times of steps; bytes moved and cores used between the end of the warm-up and the last measured step.

The first `WARMUP_STEPS` are left out (allocators, caches and pipelines fill up), and the last `DRAIN_STEPS`, in which
lanes that look ahead have no work left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.harness.processor_use import ProcessorUse, process_tree
from benchmarks.harness.thread_times import milliseconds, processor_ns
from trainer.process import peak_rss_bytes

__all__ = ["DRAIN_STEPS", "LOSS_STEPS", "WARMUP_STEPS", "Meter", "interface_bytes", "peak_bytes"]

WARMUP_STEPS = 10
DRAIN_STEPS = 16
#: First steps whose mean loss is compared between contenders.
LOSS_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    moved_bytes: int
    processors: ProcessorUse
    parts_ns: Mapping[str, int]


class Meter:
    """Measures one run.

    Args:
        num_steps: number of steps of the run.
        moved_bytes: reads a counter of bytes on the network.
        helpers: part -> root of the contender's process trees besides this process. `add_child` names those it starts.
    """

    def __init__(self, num_steps: int, moved_bytes: Callable[[], int], helpers: Mapping[str, int]) -> None:
        self._moved_bytes = moved_bytes
        self._helpers = dict(helpers)
        self._children: dict[str, int] = {}
        self._marked = (WARMUP_STEPS, num_steps - DRAIN_STEPS)
        self._ends_s: list[float] = []
        self._marks: list[_Mark] = []
        self.helpers_peak_bytes = 0

    def step(self) -> int:
        """Record the end of a step; returns its number, from 1."""
        self._ends_s.append(time.perf_counter())
        if len(self._ends_s) in self._marked:
            self._marks.append(
                _Mark(
                    moved_bytes=self._moved_bytes(),
                    processors=ProcessorUse.now([os.getpid(), *self._helpers.values()]),
                    parts_ns=processor_ns({**self._helpers, **self._children}),
                )
            )
        return len(self._ends_s)

    def add_child(self, part: str, pid: int) -> None:
        """Name a process that this one has started."""
        self._children[part] = pid

    def note_helper(self, pid: int) -> None:
        """Record the peak memory of another process of this contender and its children."""
        self.helpers_peak_bytes = sum(peak_bytes(child) for child in process_tree([pid]))

    def step_s(self) -> tuple[float, ...]:
        """Durations of the measured steps in seconds, rounded to microseconds."""
        first, last = self._marked
        ends = self._ends_s[first - 1 : last]
        return tuple(round(end - start, 6) for start, end in pairwise(ends))

    def bytes_per_step(self) -> float:
        start, end = self._marks
        return (end.moved_bytes - start.moved_bytes) / (self._marked[1] - self._marked[0])

    def processor_ms(self) -> dict[str, float]:
        """Milliseconds of processor time a step, by part."""
        start, end = self._marks
        return milliseconds(start.parts_ns, end.parts_ns, self._marked[1] - self._marked[0])

    def cores(self) -> tuple[float, float]:
        """Average cores used by this contender, and by other jobs."""
        start, end = self._marks
        return end.processors.cores_since(start.processors)


def interface_bytes(name: str) -> int:
    """Bytes received and sent on an interface of this network namespace so far, headers included.

    Both directions of a link's end; on ``lo`` every byte counts twice.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        interface, _, numbers = line.partition(":")
        if interface.strip() == name:
            fields = numbers.split()
            return int(fields[0]) + int(fields[8])
    return 0


def peak_bytes(pid: int) -> int:
    """Peak resident memory of a process; 0 if it has ended."""
    try:
        return peak_rss_bytes(pid)
    except FileNotFoundError:
        return 0
