"""What do checkpoints cost a step, and how long does a killed job take to its first step again?

    python -m benchmarks.checkpoint.training --data.path FILE --data.format criteo-tsv [--rounds 5] [--json FILE]

Each round trains the same job twice, with checkpoints and without, in turns; the order changes from round to round.
Then the job is killed in the middle and started again. Run it on an idle machine: the job needs all of its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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

import numpy as np
import torch

from bagpipe.store.server.embedded import find_server

__all__ = ["main"]


_TRAINER = [sys.executable, "-m", "trainer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds per step of one pair of runs: mean over the run, median, and seconds that lanes spent copying."""

    mean_without_s: float
    mean_with_s: float
    p50_without_s: float
    p50_with_s: float
    stall_s: float
    checkpoints: int
    steps: int


def main() -> int:
    options, job = _parse()
    print(json.dumps(_surroundings()), flush=True)
    rounds = [_round(options, job, number) for number in range(options.rounds)]
    summary = {
        "mean_ratio": statistics.median(r.mean_with_s / r.mean_without_s for r in rounds),
        "p50_ratio": statistics.median(r.p50_with_s / r.p50_without_s for r in rounds),
        "stall_per_checkpoint_in_steps": statistics.median(
            r.stall_s / max(1, r.checkpoints) / r.p50_without_s for r in rounds
        ),
        "restart_to_first_step_s": _restart(options, job),
    }
    for name, value in summary.items():
        print(f"{name}: {value:.3f}")
    if options.json:
        content = {
            "surroundings": _surroundings(),
            "job": job,
            "every": options.every,
            "rounds": [asdict(r) for r in rounds],
            **summary,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


def _round(options: argparse.Namespace, job: Sequence[str], number: int) -> Round:
    results: dict[bool, dict[str, Any]] = {}
    for saves in (True, False) if number % 2 else (False, True):
        with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder:
            more = _checkpoints(folder, options.every) if saves else []
            results[saves] = _run([*job, *more], Path(folder) / "result.json")
    without, with_ = results[False], results[True]
    assert without["embedding_digest"] == with_["embedding_digest"], "checkpoints change nothing"
    found = Round(
        mean_without_s=without["seconds"] / without["steps"],
        mean_with_s=with_["seconds"] / with_["steps"],
        p50_without_s=without["step_s_p50"],
        p50_with_s=with_["step_s_p50"],
        stall_s=with_["checkpoint_stall_s"],
        checkpoints=with_["checkpoints"],
        steps=with_["steps"],
    )
    print(
        f"round {number}: {1e3 * found.mean_without_s:.2f} ms a step without, {1e3 * found.mean_with_s:.2f} with "
        f"{found.checkpoints} checkpoints ({found.mean_with_s / found.mean_without_s:.3f}); medians "
        f"{1e3 * found.p50_without_s:.2f}, {1e3 * found.p50_with_s:.2f}",
        flush=True,
    )
    return found


def _restart(options: argparse.Namespace, job: Sequence[str]) -> float:
    """Seconds from starting a killed job again to the end of its first step."""
    with tempfile.TemporaryDirectory(prefix="bagpipe-bench-") as folder:
        arguments = [*job, *_checkpoints(folder, options.every)]
        process = _start(arguments)
        _await_first_checkpoint(Path(folder), process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        trace = Path(folder) / "trace.json"
        start_s = time.monotonic()
        process = _start([*arguments, "--run.trace", str(trace), "--run.steps", str(options.every + 1)])
        process.wait()
        whole_s = time.monotonic() - start_s
        result_s = _after_first_step_s(trace)
        return whole_s - result_s


def _await_first_checkpoint(folder: Path, process: subprocess.Popen[bytes]) -> None:
    pattern = "generation-*/step-*/manifest.json"
    while not any("step-00000000" not in str(path) for path in folder.rglob(pattern.rpartition("/")[2])):
        if process.poll() is not None:
            raise SystemExit("the job ended before its first checkpoint: give it more steps")
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
        raise SystemExit(f"the job failed: {' '.join(arguments)}")
    content: dict[str, Any] = json.loads(result.read_text())
    return content


def _start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*_TRAINER, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _surroundings() -> dict[str, str]:
    return {
        "cpus": str(os.cpu_count()),
        "machine": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "server": find_server().name,
    }


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options, job = parser.parse_known_args()
    return options, ["--config", "trainer/configs/criteo.toml", *job]


if __name__ == "__main__":
    sys.exit(main())
