"""Failpoints: named points where a process can be made to die, for tests of recovery. Cost: one comparison.

BAGPIPE_CRASH_AT=after-manifest:2          the process kills itself the second time it reaches that point
BAGPIPE_CRASH_AT=after-fetch:5:SIGINT      it sends itself another signal, such as Ctrl-C's
"""

from __future__ import annotations

import os
import signal
from collections import Counter

__all__ = ["POINTS", "hit"]

#: In the order of a batch, a checkpoint, a recovery.
POINTS = (
    "after-fetch",
    "before-write-back",
    "mid-write-back",
    "after-write-back",
    "after-dense-copy",
    "after-rotation",
    "after-checkpoint-data",
    "before-manifest",
    "after-manifest",
    "mid-commit",
    "after-commit",
    "after-acquire",
    "mid-recovery",
    "before-begin",
    "after-begin",
)

_ARMED = os.environ.get("BAGPIPE_CRASH_AT", "")
_NAME, _TIMES, _SIGNAL = (*_ARMED.split(":"), "", "")[:3]
_reached: Counter[str] = Counter()

if _ARMED and _NAME not in POINTS:
    raise ValueError(f"BAGPIPE_CRASH_AT: expected one of {', '.join(POINTS)}, with :N, got {_ARMED!r}")


def hit(point: str) -> None:
    """Kill this process if this failpoint is armed (SIGKILL, or the signal named). Callable from any thread."""
    if point == _NAME:
        _reached[point] += 1
        if _reached[point] == int(_TIMES or 1):
            os.kill(os.getpid(), signal.Signals[_SIGNAL or "SIGKILL"])
