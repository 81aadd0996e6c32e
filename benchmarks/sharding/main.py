"""What does a rank keep and send of a dense part that is divided among the ranks, and how long does a step take?

    python -m benchmarks.sharding.main [--ranks 2 4] [--width W] [--steps S] [--rounds R] [--out DIR]

A multilayer perceptron with Adam in float32, without rows: every level in the same processes, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.dense.parallel.shard_layout import kept_bytes, sent_bytes
from bagpipe.types.shard_level import ShardLevel
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.child import run_child
from benchmarks.harness.report import table, verdict
from benchmarks.sharding.stages import num_passes

#: Largest relative distance from the formulas.
KEPT_WITHIN, SENT_WITHIN = 0.05, 0.02
_ITEMSIZE, _STATES = 4, 2
_LEVELS: tuple[ShardLevel, ...] = ("none", "optimizer", "gradients", "parameters")
_HEADERS = ("parameters MB", "gradients MB", "state MB", "formula, in all", "sent MB", "formula")
_TIME = "step ms, median (lowest to highest round)"
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
        found = run_child(command, out, name=f"the job of {ranks} ranks", timeout_s=_TIMEOUT_S)
    part.keep({"ranks": ranks, "elements": _LAYERS * (options.width + 1) * options.width, **found})


def _tables(values: Values) -> str:
    """Kept and sent bytes against the formulas, and the time of a step: of the whole model, and of stages."""
    rows: list[tuple[object, ...]] = []
    staged: list[tuple[object, ...]] = []
    distances: list[tuple[float, float]] = []
    for found in (part.get("found") for part in values["parts"].values()):
        if not found:
            continue
        for level in _LEVELS:
            cells, distance = _cells(found, found["levels"][level], level, _sent(found, level))
            rows.append((found["ranks"], level, *cells))
            distances.append(distance)
        for schedule, levels in found["stages"].items():
            for level, rounds in levels.items():
                passes = num_passes(schedule, level, _LAYERS)
                sent = passes * found["elements"] * _ITEMSIZE * (found["ranks"] - 1) / found["ranks"]
                cells, distance = _cells(found, rounds, level, sent)
                most = f"{rounds[-1]['most'] / 1e6:.2f}"
                staged.append((found["ranks"], schedule, level, *cells[:3], most, f"{passes:.2f}", *cells[4:]))
                distances.append(distance)
    worst_kept, worst_sent = (max(each, default=0.0) for each in zip(*distances, strict=True)) if distances else (0, 0)
    stage_headers = (
        "ranks",
        "schedule",
        "level",
        *_HEADERS[:3],
        "parameters at most",
        "gathers and sums",
        *_HEADERS[4:],
    )
    return "\n".join(
        [
            table(("ranks", "level", *_HEADERS, _TIME), rows),
            table((*stage_headers, _TIME), staged),
            f"Targets: kept within {KEPT_WITHIN:.0%} of the formulas: {verdict(worst_kept, at_most=KEPT_WITHIN)}, at "
            f"worst {worst_kept:.2%}; sent within {SENT_WITHIN:.0%}: {verdict(worst_sent, at_most=SENT_WITHIN)}, at "
            f"worst {worst_sent:.2%}.\n",
        ]
    )


def _sent(found: Mapping[str, Any], level: ShardLevel) -> float:
    """The formula of a step's traffic of the whole model."""
    return sent_bytes(level, found["elements"], found["ranks"], itemsize=_ITEMSIZE)


def _cells(
    found: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], level: ShardLevel, travels: float
) -> tuple[tuple[str, ...], tuple[float, float]]:
    """Cells of the table, and the relative distances of kept and sent bytes from the formulas."""
    last = rounds[-1]
    formula = kept_bytes(level, found["elements"], found["ranks"], itemsize=_ITEMSIZE, states=_STATES)
    wanted = {"parameters": formula.parameters, "gradients": formula.gradients, "state": formula.state}
    kept = max(abs(last[name] / expected - 1) for name, expected in wanted.items())
    times = [1e3 * each["step_s"] for each in rounds]
    cells = (
        *(f"{last[name] / 1e6:.2f}" for name in wanted),
        f"{formula.total / 1e6:.2f}",
        f"{last['sent'] / 1e6:.2f}",
        f"{travels / 1e6:.2f}",
        f"{statistics.median(times):.0f} ({min(times):.0f} to {max(times):.0f})",
    )
    return cells, (kept, abs(last["sent"] / travels - 1))


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
