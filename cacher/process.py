"""Settings of a daemon's process.

* One malloc arena: glibc gives each thread its own, which keeps freed memory. After 300 jobs, each with a planner
  thread, a daemon held 120 MB with the default and 90 MB with one arena; under attack 240 MB and 150 MB.
* A thread waits at most `SWITCH_INTERVAL_S` for the interpreter lock (default: 5 ms), because the event loop has short
  tasks for many ranks while the planner runs.
* The maximum of file descriptors: the usual 1,024 are fewer than the idle connections that a daemon must survive.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["SWITCH_INTERVAL_S", "configure_process", "resident_bytes"]

SWITCH_INTERVAL_S = 0.5e-3

#: Parameter of mallopt(3), from malloc.h.
_M_ARENA_MAX = -8


def configure_process() -> None:
    """Apply the settings. Call it before starting threads."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # glibc only
        mallopt(_M_ARENA_MAX, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
