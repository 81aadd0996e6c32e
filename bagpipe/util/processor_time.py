"""Processor time of other processes, from proc(5), in steps of a hundredth of a second."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["TICK_S", "children_s", "process_s"]

#: Steps of these times.
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def process_s(process: int) -> float:
    """Seconds of user and system time of a process (stat: utime and stime).

    Raises:
        OSError: there is no such process.
    """
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def children_s() -> float:
    """Seconds of the processes that this one has started and not waited for."""
    found = 0.0
    for tasks in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread or a child that has ended
            for child in (tasks / "children").read_text(encoding="ascii").split():
                found += process_s(int(child))
    return found
