"""Failpoints: named points where a process can be made to die, for tests of recovery. Cost: one comparison.

BAGPIPE_CRASH_AT=after-manifest:2     the process kills itself the second time it reaches that point
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
_NAME, _, _TIMES = _ARMED.partition(":")
_reached: Counter[str] = Counter()

if _ARMED and _NAME not in POINTS:
    raise ValueError(f"BAGPIPE_CRASH_AT: expected one of {', '.join(POINTS)}, with :N, got {_ARMED!r}")


def hit(point: str) -> None:
    """Kill this process (SIGKILL) if this failpoint is armed. Callable from any thread."""
    if point == _NAME:
        _reached[point] += 1
        if _reached[point] == int(_TIMES or 1):
            os.kill(os.getpid(), signal.SIGKILL)
