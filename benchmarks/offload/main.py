"""How much time does a byte budget of the dense part cost, if chunks move beside the compute?

python -m benchmarks.offload.main [--layers 8] [--width 512] [--examples 2048] [--rounds 8] [--out DIR]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table, verdict
from benchmarks.harness.rounds import paired_ratios
from benchmarks.offload.contest import Sizes, contest

#: Of the time of a batch without chunks, at half of the bytes.
_TARGET = 1.15


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    return {"budgets": partial(_measure, options)}


def _measure(options: argparse.Namespace, part: Part) -> None:
    torch.set_num_threads(1)
    sizes = Sizes(
        layers=options.layers,
        width=options.width,
        examples=options.examples,
        shares=options.shares,
        rounds=options.rounds,
        warmups=2,
    )
    for found in contest(sizes, part.say):
        part.add(asdict(found))
        part.say(f"{found.name}: {statistics.median(found.seconds) * 1e3:.0f} ms")


def tables(values: Values) -> str:
    """Time of a batch by budget."""
    records: list[dict[str, Any]] = found_of(values, "budgets") or []
    if not records:
        return "Nothing was measured.\n"
    plain = records[0]
    rows = []
    for found in records:
        ratio = paired_ratios(found["seconds"], plain["seconds"])
        processor = paired_ratios(found["processor_s"], plain["processor_s"])
        is_target = found["name"] == "0.50"
        rows.append(
            (
                found["name"],
                f"{found['budget_bytes'] / 1e6:.0f}",
                f"{found['peak_bytes'] / 1e6:.0f}",
                f"{found['copies']:.0f}",
                f"{statistics.median(found['seconds']) * 1e3:.0f}",
                f"{ratio.median:.2f} ({ratio.low_quartile:.2f} to {ratio.high_quartile:.2f})",
                f"{processor.median:.2f}",
                "" if found["simulated"] is None else f"{found['simulated']:.2f}",
                f"at most {_TARGET}: {verdict(ratio.median, at_most=_TARGET)}" if is_target else "",
                "the same" if found["digest"] == plain["digest"] else "DIFFERENT",
            )
        )
    headers = (
        "budget", "MB on the device", "most MB there", "copies a batch", "median ms", "ratio",
        "processor time", "simulated", "target", "bits",
    )  # fmt: skip
    return f"Parameters, gradients and Adam's state: {plain['state_bytes'] / 1e6:.0f} MB.\n\n" + table(headers, rows)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--examples", type=int, default=2048, help="of a batch")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.75, 0.5, 0.25], help="must have 1.0")
    parser.add_argument("--rounds", type=int, default=8)


def _facts(options: argparse.Namespace) -> Mapping[str, Any]:
    return {"notes": [f"{options.layers} layers of {options.width}, {options.examples} examples, one compute thread"]}


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    rehearsal={"layers": 6, "width": 32, "examples": 8, "rounds": 2},
    packages=("torch", "numpy"),
    facts=_facts,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
