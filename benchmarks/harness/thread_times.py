"""Processor time of the threads of a job by part: its lanes, its cacher, its server.

before = processor_ns(helpers) ... after = processor_ns(helpers)      milliseconds(before, after, steps) -> by part
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.processor_use import tree_s

__all__ = ["milliseconds", "processor_ns"]

#: Prefix of a thread's name -> part; the longest name first. Threads of other names: `_OTHERS`.
_PARTS = {"MainThread": "compute", "bagpipe-": "{}", "cacher-client": "client"}
_OTHERS = "gRPC and others"


def processor_ns(helpers: Mapping[str, int]) -> Counter[str]:
    """Nanoseconds on a processor so far, by part.

    Threads of this process by Linux's ``schedstat``, which counts them exactly, other processes in clock ticks.

    Args:
        helpers: part -> root of a process tree other than this process.
    """
    found: Counter[str] = Counter()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        found[_part(names.get(int(task.name), ""))] += _run_ns(task)
    for part, root in helpers.items():
        found[part] += round(tree_s([root]) * 1e9)
    return found


def milliseconds(before: Mapping[str, int], after: Mapping[str, int], num_steps: int) -> dict[str, float]:
    """Milliseconds a step by part, the largest first. Threads of this process that have ended count for nothing."""
    spent = {part: (ns - before.get(part, 0)) / num_steps / 1e6 for part, ns in after.items()}
    return {part: round(ms, 4) for part, ms in sorted(spent.items(), key=lambda item: -item[1]) if ms > 0}


def _part(name: str) -> str:
    for prefix, part in _PARTS.items():
        if name.startswith(prefix):
            return part.format(name.removeprefix(prefix))
    return _OTHERS


def _run_ns(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):
        return 0
