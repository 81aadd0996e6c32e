"""Processor time of the threads of a job by part: its lanes, its cacher, its server.

before = processor_ns(helpers) ... after = processor_ns(helpers)
milliseconds(before, after, steps) ─> by part ─> budget(parts): a row of a table headed BUDGET
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.processor_use import tree_s

__all__ = ["BUDGET", "budget", "median_budget", "milliseconds", "processor_ns"]

#: Prefix of a thread's name -> part; the longest name first. Threads of other names: `_OTHERS`.
_PARTS = {"MainThread": "compute", "bagpipe-": "{}", "cacher-client": "client"}
_OTHERS = "gRPC and others"

#: Processes beside the training process, and all parts, in the order of a report.
_BESIDE = ("cacher", "server")
_REPORTED = ("compute", "data", "copy", "net-in", "net-out", "client", _OTHERS, *_BESIDE)
#: Headers of a table of `budget` rows.
BUDGET = ("training process", *_REPORTED)


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


def median_budget(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of several runs, part by part; a part that a run lacks took no time there."""
    parts = dict.fromkeys(part for run in runs for part in run)
    return {part: statistics.median(run.get(part, 0.0) for run in runs) for part in parts}


def budget(parts: Mapping[str, float]) -> tuple[str, ...]:
    """The cells of a row under `BUDGET`: milliseconds of the training process and of each part."""
    own = sum(ms for part, ms in parts.items() if part not in _BESIDE)
    return (f"{own:.2f}", *(f"{parts[part]:.2f}" if part in parts else "" for part in _REPORTED))


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
