"""Settings of a daemon's process.

* One arena: glibc gives every thread its own, and each keeps what was freed in it. After 300 jobs, each with a planner
  thread of its own, a daemon held 120 MB with the default and 90 MB with one arena; under attack 240 MB and 150 MB.
* A thread that wants the interpreter waits at most `SWITCH_INTERVAL_S` for the planner (default: 5 ms): the event loop
  has short things to do, for many ranks.
* gRPC's core keeps quiet: its lines are no JSON, and say nothing that is not counted or logged here.
* As many descriptors as are allowed: the usual 1,024 are fewer than the idle connections a daemon must bear.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from contextlib import suppress

__all__ = ["SWITCH_INTERVAL_S", "settle_process"]

SWITCH_INTERVAL_S = 0.5e-3

#: Parameter of mallopt(3), from malloc.h.
_M_ARENA_MAX = -8


def settle_process() -> None:
    """Apply the settings; before any thread is started."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library than glibc has habits of its own
        mallopt(_M_ARENA_MAX, 1)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
