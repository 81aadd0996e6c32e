"""One day of a model that is trained every day: convert, train from yesterday's model, predict, export.

mkdir days; python -m data synth --rows 5000 --seed 0 --out days/day_0.tsv
python -m data synth --rows 5000 --seed 1 --out days/day_1.tsv
python examples/daily/day.py 0 --days days --runs runs
python examples/daily/day.py 1 --days days --runs runs

    days/day_1.tsv ──convert──> runs/day_1.arrow ──train──> runs/day_1/ (checkpoints), runs/day_1.json
    runs/day_0/, its best checkpoint ──start_from────┘         └──best──> runs/day_1.scores.parquet, runs/day_1.model/

No day is trained again. A day that was killed goes on by the same command: what is done is skipped or resumed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(command: Sequence[str]) -> int:
    """Run ``python COMMAND``; returns its exit code."""
    return subprocess.run([sys.executable, *command], check=False).returncode


def commands(day: int, days: Path, runs: Path, flags: Sequence[str]) -> list[list[str]]:
    """The commands that a day still needs."""
    raw, name = days / f"day_{day}.tsv", f"day_{day}"
    data, checkpoints, model = runs / f"{name}.arrow", runs / name, runs / f"{name}.model"
    scores, yesterday = runs / f"{name}.scores.parquet", runs / f"day_{day - 1}"
    job = ["--config", str(HERE / "job.toml"), "--data.path", str(data), "--checkpoint.dir", str(checkpoints), *flags]
    start = ["--checkpoint.start_from", f"{yesterday}@best"] if yesterday.is_dir() else []
    best = ["--checkpoint.resume", "best"]
    needed = []
    if not data.exists():
        needed.append(["-m", "data", "convert", str(raw), str(data)])
    needed.append(["-m", "trainer", *job, *start, "--result", str(runs / f"{name}.json")])
    needed.append(["-m", "trainer", "predict", *job, *best, "--out", str(scores)])
    if not model.exists():
        needed.append(
            ["-m", "trainer", "export", "--checkpoint.dir", str(checkpoints), "--step", "best", "--out", str(model)]
        )
    return needed


def main(argv: Sequence[str], run: Callable[[Sequence[str]], int] = run) -> int:
    """Run a day. Returns the exit code of the command that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("day", type=int, help="number of the day")
    parser.add_argument("--days", type=Path, default=Path("days"), help="folder of day_N.tsv, in Criteo's format")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of what is made")
    options, flags = parser.parse_known_args(argv)  # further flags are those of the training program
    options.runs.mkdir(parents=True, exist_ok=True)
    for command in commands(options.day, options.days, options.runs, flags):
        print("$ python", shlex.join(command), flush=True)
        code = run(command)
        if code:
            return code
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(HERE.parents[1]))
    sys.exit(main(sys.argv[1:]))
