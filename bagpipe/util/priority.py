"""Scheduling priority: what works beside the lane that computes gives way to it on a busy host.

A step ends when its computation does. Lanes, cacher and store server work ahead of it, so a short wait for a processor
costs them nothing; a wait of the computation is lost. Measured in benchmarks/overlap on two CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

__all__ = ["BACKGROUND_NICENESS", "lower_process_priority", "lower_thread_priority"]

#: Added to the starter's niceness. Five levels are a third of the weight of a thread beside it (sched(7)), so what is
#: in the background still gets its share of a host that others keep busy.
BACKGROUND_NICENESS = 5
#: The lowest priority.
_MAX_NICENESS = 19


def lower_process_priority(process: subprocess.Popen[bytes]) -> None:
    """Lower the priority of a process just started, before it has threads. Does nothing where that is not possible."""
    _lower(process.pid)


def lower_thread_priority() -> None:
    """Lower the priority of the calling thread. Only Linux has priorities of threads; elsewhere nothing is done."""
    if sys.platform == "linux":
        _lower(0)


def _lower(which: int) -> None:
    """Raise the niceness of a process, or on Linux of a thread, by its id; 0 is the caller."""
    with suppress(OSError):  # it has ended, or the system does not allow it
        niceness = os.getpriority(os.PRIO_PROCESS, which) + BACKGROUND_NICENESS
        os.setpriority(os.PRIO_PROCESS, which, min(niceness, _MAX_NICENESS))
