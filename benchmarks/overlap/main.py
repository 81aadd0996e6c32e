"""Is embedding access hidden behind computation? Step times over cache size and lookahead.

    python -m benchmarks.overlap.main [--workloads paper-75 paper-91] [--repeats 2] [--lookaheads 1 8 32] [--out DIR]

Needs root, `ip` and `tc`; removes its network namespace at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.harness.benchmark import Benchmark, Measure, Part, run_benchmark
from benchmarks.harness.machine import store_server
from benchmarks.harness.shaped_link import check_privileges
from benchmarks.overlap.grid import Record, check_same_work, run_workload
from benchmarks.overlap.report import draw, tables
from benchmarks.overlap.workload import LOOKAHEADS, WORKLOADS
from trainer.process import configure_process


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    check_privileges()
    if options.trace is not None:
        options.trace.mkdir(parents=True, exist_ok=True)
    return {name: partial(_measure, options, name) for name in options.workloads}


def _measure(options: argparse.Namespace, name: str, part: Part) -> None:
    workload = WORKLOADS[name]
    if options.rehearse:
        workload = dataclasses.replace(
            workload, batch_size=128, cache_shares=(0.1,), warmup_steps=24, measured_steps=4, direct_steps=4
        )
    records: list[Record] = []

    def told(record: Record, line: str) -> None:
        records.append(record)
        part.add(asdict(record))
        part.say(line)

    configure_process()
    run_workload(
        workload,
        lookaheads=options.lookaheads,
        repeats=options.repeats,
        tries=options.tries,
        told=told,
        trace_dir=options.trace,
    )
    check_same_work(records)


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2, help="times the whole grid is measured")
    parser.add_argument("--lookaheads", type=int, nargs="+", default=list(LOOKAHEADS))
    parser.add_argument("--tries", type=int, default=4, help="times a trial that other jobs disturb is made")
    parser.add_argument("--trace", type=Path, help="folder for a Perfetto trace of every trial")


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=tables,
    draw=draw,
    rehearsal={"workloads": ["paper-91"], "repeats": 1, "tries": 1, "lookaheads": [8]},
    packages=("torch", "numpy"),
    machine=store_server,
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
