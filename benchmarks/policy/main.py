"""How near the offline optimum is the oracle? Rows read again after an eviction, by policy, lookahead and cache size.

    python -m benchmarks.policy.main sample|kaggle|zipf      # replays; writes results/NAME.json, then the report
    python -m benchmarks.policy.main --report                # README's tables and curves.svg from the results

Counts do not depend on the machine. `sample` needs $BAGPIPE_CRITEO_SAMPLE, the path of the real sample.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from bagpipe.errors import InputError
from benchmarks.policy.logs import EXPERIMENTS, Experiment, Log
from benchmarks.policy.replay import HINDSIGHT, Cell, replay
from benchmarks.policy.report import write_report

RESULTS = Path(__file__).parent / "results"
OPTIMUM = "offline-belady"
BASELINES = ("lru", "lfu", "static-hot")
POLICIES = ("belady-window", "drop-unused")


def cells(experiment: Experiment, batch_size: int, distinct: int) -> Iterator[Cell]:
    """What to replay, the optimum of each size first."""
    sizes = [(share, int(share * distinct)) for share in experiment.shares]
    for share, cache_rows in [*sizes, *((None, rows) for rows in experiment.cache_rows)]:
        todo: list[tuple[str, int | None]] = [(OPTIMUM, None)]
        last = experiment.lookaheads[-1]
        todo += [(policy, last) for policy in (POLICIES[0], HINDSIGHT)]
        todo += [(policy, None) for policy in BASELINES]
        todo += [(policy, n) for n in experiment.lookaheads for policy in POLICIES if (policy, n) not in todo]
        todo += [(HINDSIGHT, n) for n in experiment.lookaheads if share is None and n != last]
        for policy, lookahead in todo:
            yield Cell(policy=policy, batch_size=batch_size, lookahead=lookahead, share=share, cache_rows=cache_rows)


def run_log(experiment: Experiment, batch_size: int, log: Log, folder: Path) -> Iterator[Cell]:
    """Replay every cell."""
    optimum: int | None = None
    for cell in cells(experiment, batch_size, log.distinct):
        start = time.perf_counter()
        outcome = replay(log, cell.policy, cell.lookahead, cell.cache_rows, folder)
        if cell.policy == OPTIMUM:
            optimum = outcome.rows_fetched
        ratio = outcome.rows_fetched / optimum if outcome.rows_fetched is not None and optimum else None
        done = replace(cell, **asdict(outcome), ratio=ratio)
        print(_line(done), f"{time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        yield done


def run(name: str) -> None:
    """Replay one comparison and write its results after every size of the cache."""
    experiment = EXPERIMENTS[name]
    done: list[Cell] = []
    logs: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in experiment.batch_sizes:
            with experiment.open(batch_size, Path(folder)) as log:
                sizes = {"batches": len(log.batches), "rows_unique": log.batches.num_rows, "distinct": log.distinct}
                logs.append({"batch_size": batch_size, **sizes})
                for cell in run_log(experiment, batch_size, log, Path(folder)):
                    done.append(cell)
                    _write(name, experiment, logs, done)


def _write(name: str, experiment: Experiment, logs: list[dict[str, int]], done: list[Cell]) -> None:
    text = json.dumps(
        {
            "title": experiment.title,
            "lookahead": experiment.lookaheads[-1],
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "logs": logs,
            "cells": [asdict(cell) for cell in done],
        },
        indent=1,
    )
    beside = RESULTS / f".{name}.json"
    beside.write_text(text + "\n")
    os.replace(beside, RESULTS / f"{name}.json")


def _line(cell: Cell) -> str:
    setting = f"{cell.batch_size} {cell.cache_rows} {cell.policy} {cell.lookahead or ''}".strip()
    if cell.error or cell.ratio is None:
        return f"{setting}: {cell.error or 'no reference'}"
    return f"{setting}: {cell.rows_fetched} rows, {cell.ratio:.3f}"


def main() -> None:
    """Run the comparisons named, or all; then write the report of all results there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="|".join(EXPERIMENTS), help="default: all")
    parser.add_argument("--report", action="store_true", help="only write tables and plot from the results")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"expected {', '.join(EXPERIMENTS)}, got {unknown[0]}")
    try:
        for name in [] if options.report else options.names or EXPERIMENTS:
            run(name)
    except InputError as error:
        parser.error(str(error))
    write_report(RESULTS, Path(__file__).parent)


if __name__ == "__main__":
    main()
