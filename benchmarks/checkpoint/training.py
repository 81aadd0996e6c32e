"""Part `training`: a job with and without checkpoints, interleaved; then it is killed and started again."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bagpipe.errors import JobError
from benchmarks.harness.benchmark import Part
from benchmarks.harness.rounds import turns

__all__ = ["measure_training"]

_TRAINER = [sys.executable, "-m", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One pair of runs. Seconds per step (mean and median of a run), and seconds that lanes spent copying."""

    mean_without_s: float
    mean_with_s: float
    p50_without_s: float
    p50_with_s: float
    stall_s: float
    checkpoints: int
    steps: int


def measure_training(options: argparse.Namespace, part: Part) -> None:
    """Keep every round, then the medians of their ratios and the time of a restart. JobError: a job failed."""
    job = ["--config", "trainer/configs/criteo.toml", *options.job]
    results: dict[bool, dict[str, Any]] = {}
    rounds: list[Round] = []
    for number, name in turns(["with", "without"], options.rounds):
        saves = name == "with"
        with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder:
            more = _checkpoints(folder, options.every) if saves else []
            results[saves] = _run([*job, *more], Path(folder) / "result.json")
        if len(results) == 2:
            rounds.append(_round(results[False], results[True]))
            results = {}
            part.keep({"rounds": [asdict(found) for found in rounds]})
            part.say(f"round {number}: {rounds[-1]}")
    stalls = (r.stall_s / max(1, r.checkpoints) / r.p50_without_s for r in rounds)
    found = {
        "every": options.every,
        "rounds": [asdict(r) for r in rounds],
        "mean_ratio": statistics.median(r.mean_with_s / r.mean_without_s for r in rounds),
        "p50_ratio": statistics.median(r.p50_with_s / r.p50_without_s for r in rounds),
        "stall_per_checkpoint_in_steps": statistics.median(stalls),
    }
    part.keep(found)
    part.keep({**found, "restart_to_first_step_s": _restart(job, options.every)})


def _round(without: dict[str, Any], with_: dict[str, Any]) -> Round:
    assert without["embedding_digest"] == with_["embedding_digest"], "checkpoints change nothing"
    return Round(
        mean_without_s=without["seconds"] / without["steps"],
        mean_with_s=with_["seconds"] / with_["steps"],
        p50_without_s=without["step_s_p50"],
        p50_with_s=with_["step_s_p50"],
        stall_s=with_["checkpoint_stall_s"],
        checkpoints=with_["checkpoints"],
        steps=with_["steps"],
    )


def _restart(job: Sequence[str], every: int) -> float:
    """Seconds from starting a killed job again to the end of its first step."""
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder:
        arguments = [*job, *_checkpoints(folder, every)]
        process = _start(arguments)
        _await_first_checkpoint(Path(folder), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        trace = Path(folder) / "trace.json"
        start_s = time.monotonic()
        process = _start([*arguments, "--run.trace", str(trace), "--run.steps", str(every + 1)])
        process.wait()
        whole_s = time.monotonic() - start_s
        return whole_s - _after_first_step_s(trace)


def _await_first_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    pattern = "generation-*/step-*/manifest.json"
    while not any("step-00000000" not in str(path) for path in folder.rglob(pattern.rpartition("/")[2])):
        if process.poll() is not None:
            raise JobError("the job ended before its first checkpoint: give it more steps")
        time.sleep(0.02)


def _after_first_step_s(trace: Path) -> float:
    """Seconds between the end of the first training step and the end of the trace."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    ends = [event["ts"] + event["dur"] for event in events]
    first = min(event["ts"] + event["dur"] for event in events if event["name"].startswith("0OPT"))
    return float(max(ends) - first) / 1e6


def _checkpoints(folder: str, every: int) -> list[str]:
    return ["--checkpoint.dir", f"{folder}/checkpoints", "--checkpoint.every", str(every)]


def _run(arguments: Sequence[str], result: Path) -> dict[str, Any]:
    process = _start([*arguments, "--result", str(result)])
    if process.wait():
        raise JobError(f"the job failed: {' '.join(arguments)}")
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*_TRAINER, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
