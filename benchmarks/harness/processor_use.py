"""Processor time of a job's processes and of everything else, to detect measurements that other jobs disturbed.

before = ProcessorUse.now(pids) ... after = ProcessorUse.now(pids)      after.cores_since(before) -> own, other cores
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MAX_OTHER_CORES", "ProcessorUse", "process_tree", "tree_s"]

#: Cores used by other jobs above which a run counts as disturbed. The kernel's own threads use a few hundredths.
MAX_OTHER_CORES = 0.15

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_tree(pids: Sequence[int]) -> tuple[int, ...]:
    """The processes and all their descendants."""
    found: list[int] = []
    for pid in pids:
        found.append(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            found += process_tree([int(child) for child in _read(children).split()])
    return tuple(found)


def tree_s(pids: Sequence[int]) -> float:
    """User and system seconds of the processes and all their descendants, threads that have ended included."""
    ticks = 0
    for pid in process_tree(pids):
        fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
        if fields:  # gone between listing and reading
            ticks += int(fields[11]) + int(fields[12])  # utime, stime: proc(5)
    return ticks * _TICK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorUse:
    """Totals at one moment.

    Attributes:
        at_s: time of the reading.
        own_s: user and system seconds of our processes.
        all_s: of all processes and the kernel, without idle, waiting and stolen time.
    """

    at_s: float
    own_s: float
    all_s: float

    @classmethod
    def now(cls, pids: Sequence[int]) -> ProcessorUse:
        """Read /proc; `pids` are the roots of our process trees."""
        own_s = tree_s(pids)
        user, nice, system, _idle, _iowait, irq, softirq = (
            int(word) for word in _read(Path("/proc/stat")).split("\n", 1)[0].split()[1:8]
        )
        return cls(
            at_s=time.perf_counter(),
            own_s=own_s,
            all_s=(user + nice + system + irq + softirq) * _TICK_S,
        )

    def cores_since(self, before: ProcessorUse) -> tuple[float, float]:
        """Average cores used since `before`: (ours, others')."""
        elapsed_s = self.at_s - before.at_s
        own_s = self.own_s - before.own_s
        return own_s / elapsed_s, max(0.0, self.all_s - before.all_s - own_s) / elapsed_s


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
