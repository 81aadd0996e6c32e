"""What does a rank keep and send of a dense part that is divided among the ranks, and how long does a step take?

    python -m benchmarks.sharding.main [--ranks 2 4] [--width W] [--steps S] [--rounds R] [--out DIR]

A multilayer perceptron with Adam in float32, without rows: every level in the same processes, round by round.
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

from bagpipe.dense.parallel.shard_layout import ShardLevel, kept_bytes, sent_bytes
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.child import run_child
from benchmarks.harness.report import table, verdict

#: Largest relative distance from the formulas.
KEPT_WITHIN, SENT_WITHIN = 0.05, 0.02
_ITEMSIZE, _STATES = 4, 2
_LEVELS: tuple[ShardLevel, ...] = ("none", "optimizer", "gradients", "parameters")
_LAYERS = 6
_TIMEOUT_S = 500.0


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=1024, help="inputs and outputs of each of six layers")
    parser.add_argument("--steps", type=int, default=12, help="of a level and round")
    parser.add_argument("--rounds", type=int, default=3)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    return {f"{ranks} ranks": partial(_measure, options, ranks) for ranks in options.ranks}


def _measure(options: argparse.Namespace, ranks: int, part: Part) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "benchmarks.sharding.ranks", "--out", str(out)]
        for name in ("width", "steps", "rounds"):
            command += [f"--{name}", str(getattr(options, name))]
        levels = run_child(command, out, name=f"the job of {ranks} ranks", timeout_s=_TIMEOUT_S)
    part.keep({"ranks": ranks, "elements": _LAYERS * (options.width + 1) * options.width, "levels": levels})


def _tables(values: Values) -> str:
    """Kept and sent bytes against the formulas, and the time of a step."""
    rows, worst_kept, worst_sent = [], 0.0, 0.0
    for found in (part.get("found") for part in values["parts"].values()):
        if not found:
            continue
        for level in _LEVELS:
            row, kept, sent = _row(found, level)
            rows.append(row)
            worst_kept, worst_sent = max(worst_kept, kept), max(worst_sent, sent)
    headers = ("ranks", "level", "parameters MB", "gradients MB", "state MB", "formula, in all", "sent MB", "formula")
    return "\n".join(
        [
            table((*headers, "step ms, median (lowest to highest round)"), rows),
            f"Targets: kept within {KEPT_WITHIN:.0%} of the formulas: {verdict(worst_kept, at_most=KEPT_WITHIN)}, at "
            f"worst {worst_kept:.2%}; sent within {SENT_WITHIN:.0%}: {verdict(worst_sent, at_most=SENT_WITHIN)}, at "
            f"worst {worst_sent:.2%}.\n",
        ]
    )


def _row(found: Mapping[str, Any], level: ShardLevel) -> tuple[tuple[object, ...], float, float]:
    """A row of the table, and the relative distances of kept and sent bytes from the formulas."""
    rounds, ranks, elements = found["levels"][level], found["ranks"], found["elements"]
    last = rounds[-1]
    formula = kept_bytes(level, elements, ranks, itemsize=_ITEMSIZE, states=_STATES)
    wanted = {"parameters": formula.parameters, "gradients": formula.gradients, "state": formula.state}
    kept = max(abs(last[name] / expected - 1) for name, expected in wanted.items())
    travels = sent_bytes(level, elements, ranks, itemsize=_ITEMSIZE)
    times = [1e3 * each["step_s"] for each in rounds]
    row = (
        ranks,
        level,
        *(f"{last[name] / 1e6:.2f}" for name in wanted),
        f"{formula.total / 1e6:.2f}",
        f"{last['sent'] / 1e6:.2f}",
        f"{travels / 1e6:.2f}",
        f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})",
    )
    return row, kept, abs(last["sent"] / travels - 1)


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"ranks": [2], "width": 64, "steps": 3, "rounds": 1},
    packages=("torch",),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
