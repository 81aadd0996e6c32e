"""What does an evaluation during training cost beside its own forwards, and what does writing scores cost?

python -m benchmarks.evaluation.main [--every 50] [--repeats 5] [--out DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.util.environment import check_environment
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.child import run_child
from benchmarks.harness.machine import TRAINING_PACKAGES, store_server
from benchmarks.harness.report import table, verdict

_CONFIG = "trainer/configs/synthetic.toml"
_TIMEOUT_S = 500.0


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    check_environment("cpu")
    return {"synthetic": partial(_measure, options)}


def _measure(options: argparse.Namespace, part: Part) -> None:
    flags = ["--config", _CONFIG, "--data.limit", str(options.examples), "--eval.every", str(options.every)]
    for repeat in range(options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            outcome = Path(folder) / "outcome.json"
            command = [sys.executable, "-m", "benchmarks.evaluation.trial", str(outcome), folder, str(options.turns)]
            found = run_child([*command, *flags], outcome, name="the trial", timeout_s=_TIMEOUT_S)
        part.add(found)
        later = found["evaluations"][1:] or found["evaluations"]
        part.say(f"#{repeat} {_ratio(later, 'wall_s', 'forward_wall_s'):.2f} times the forwards")


def _ratio(evaluations: list[dict[str, float]], whole: str, own: str) -> float:
    return statistics.median(item[whole] / item[own] for item in evaluations)


def tables(values: Values) -> str:
    """Evaluations against their forwards, and predictions against evaluation."""
    trials = found_of(values, "synthetic") or []
    firsts = [trial["evaluations"][0] for trial in trials]
    later = [item for trial in trials for item in trial["evaluations"][1:] or trial["evaluations"]]
    headers = ("evaluation", "wall ms", "its forwards ms", "wall / forwards", "target", "processor / forwards", "runs")
    rows = [
        _row("first of a job", firsts, ""),
        _row("later ones", later, verdict(_ratio(later, "wall_s", "forward_wall_s"), at_most=2.0)),
    ]
    turns = {name: [seconds for trial in trials for seconds in trial["turns"][name]] for name in ("eval", "predict")}
    rate = statistics.median(turns["eval"]) / statistics.median(turns["predict"])
    scores = [
        (f"trainer {name}", f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f}", str(len(seconds)))
        for name, seconds in turns.items()
    ]
    return (
        "### Evaluations during training\n\n"
        + table(headers, rows)
        + "\n### Scores of all examples\n\n"
        + table(("command", "median s", "least s", "runs"), scores)
        + f"\nRate of `predict` / rate of `eval`: {rate:.2f}. At least 0.9: {'met' if rate >= 0.9 else 'missed'}.\n"
    )


def _row(name: str, items: list[dict[str, float]], judged: str) -> tuple[str, ...]:
    return (
        name,
        f"{statistics.median(item['wall_s'] for item in items) * 1e3:.0f}",
        f"{statistics.median(item['forward_wall_s'] for item in items) * 1e3:.0f}",
        f"{_ratio(items, 'wall_s', 'forward_wall_s'):.2f}",
        f"at most 2.00: {judged}" if judged else "",
        f"{_ratio(items, 'processor_s', 'forward_processor_s'):.2f}",
        str(len(items)),
    )


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", type=int, default=400_000, help="of which a tenth is held out")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2, help="runs of each scoring command in a repeat")


def _facts(options: argparse.Namespace) -> Mapping[str, Any]:
    return {"notes": [f"{_CONFIG}, {options.examples:,} examples, evaluation every {options.every} steps"]}


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    rehearsal={"examples": 30_000, "every": 5, "repeats": 1, "turns": 1},
    packages=(*TRAINING_PACKAGES, "redis"),
    machine=store_server,
    facts=_facts,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
