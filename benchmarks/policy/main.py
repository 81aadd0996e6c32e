"""How close to the offline optimum is the oracle? Rows fetched again, by policy, lookahead and cache size.

    python -m benchmarks.policy.main [sample] [kaggle] [zipf] [--out DIR]

Counts do not depend on the machine, so parts found on several machines stay together. `sample` needs
$BAGPIPE_CRITEO_SAMPLE, the path of the real sample.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.click_logs import SAMPLE_VARIABLE
from benchmarks.policy.logs import EXPERIMENTS, Experiment, Log
from benchmarks.policy.replay import HINDSIGHT, LOG_ORACLE, Cell, replay
from benchmarks.policy.report import draw, tables

OPTIMUM = "offline-belady"
BASELINES = ("lru", "lfu", "static-hot")
POLICIES = ("belady-window", "drop-unused")


def cells(experiment: Experiment, batch_size: int, distinct: int) -> Iterator[Cell]:
    """The cells to replay; the optimum of each cache size comes first."""
    sizes = [(share, int(share * distinct)) for share in experiment.shares]
    for share, cache_rows in [*sizes, *((None, rows) for rows in experiment.cache_rows)]:
        todo: list[tuple[str, int | None]] = [(OPTIMUM, None)]
        last = experiment.lookaheads[-1]
        todo += [(LOG_ORACLE, n) for n in reversed(experiment.lookaheads)]
        todo += [(policy, last) for policy in (POLICIES[0], HINDSIGHT)]
        todo += [(policy, None) for policy in BASELINES]
        todo += [(policy, n) for n in experiment.lookaheads for policy in POLICIES if (policy, n) not in todo]
        todo += [(HINDSIGHT, n) for n in experiment.lookaheads if share is None and n != last]
        for policy, lookahead in todo:
            yield Cell(policy=policy, batch_size=batch_size, lookahead=lookahead, share=share, cache_rows=cache_rows)


def run_log(experiment: Experiment, batch_size: int, log: Log, folder: Path) -> Iterator[Cell]:
    """Every cell of a log, with its outcome."""
    optimum: int | None = None
    for cell in cells(experiment, batch_size, log.distinct):
        outcome = replay(log, cell.policy, cell.lookahead, cell.cache_rows, folder)
        if cell.policy == OPTIMUM:
            optimum = outcome.rows_fetched
        ratio = outcome.rows_fetched / optimum if outcome.rows_fetched is not None and optimum else None
        yield replace(cell, **asdict(outcome), ratio=ratio)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    names = options.names or list(EXPERIMENTS)
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise InputError(f"expected names among {', '.join(EXPERIMENTS)}, got {unknown[0]!r}")
    if "sample" in names and not os.environ.get(SAMPLE_VARIABLE):
        raise InputError(f"{SAMPLE_VARIABLE} must name the Criteo sample, in the format criteo-tsv; it is not set")
    return {name: partial(_measure, name, options.batches) for name in names}


def _measure(name: str, num_batches: int, part: Part) -> None:
    experiment = EXPERIMENTS[name]
    found: dict[str, Any] = {"title": experiment.title, "lookahead": experiment.lookaheads[-1], "logs": [], "cells": []}
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in experiment.batch_sizes:
            limited = dataclasses.replace(experiment, rows=partial(experiment.rows, num_batches=num_batches))
            with limited.open(batch_size, Path(folder)) as log:
                sizes = {"batches": len(log.batches), "rows_unique": log.batches.num_rows, "distinct": log.distinct}
                found["logs"].append({"batch_size": batch_size, **sizes})
                for cell in run_log(experiment, batch_size, log, Path(folder)):
                    found["cells"].append(asdict(cell))
                    part.keep(found)
                    part.say(_line(cell))


def _line(cell: Cell) -> str:
    setting = f"{cell.batch_size} {cell.cache_rows} {cell.policy} {cell.lookahead or ''}".strip()
    if cell.error or cell.ratio is None:
        return f"{setting}: {cell.error or 'no reference'}"
    return f"{setting}: {cell.rows_fetched} rows, {cell.ratio:.3f}"


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="|".join(EXPERIMENTS), help="default: all")
    parser.add_argument("--batches", type=int, default=2000, help="of the synthetic logs")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    draw=draw,
    counts=True,
    rehearsal={"names": ["zipf"], "batches": 20},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
