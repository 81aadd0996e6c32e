"""Is embedding access hidden behind computation? The whole curve over cache size and lookahead.

    python -m benchmarks.overlap.main [--workloads paper-75,paper-91] [--repeats 2] [--lookaheads 1,8,32] [--out DIR]

Needs root, `ip` and `tc`. Writes results.json, tables.md and curve.svg to --out, and removes its network namespace.
Exit codes: 0 done; 2 cannot run here (one line says why); 1 failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np
import torch

from bagpipe.errors import InputError
from bagpipe.util.machine import processor_name
from benchmarks.overlap.experiment import Record, check_same_work, run_workload
from benchmarks.overlap.link import check_privileges, server_version
from benchmarks.overlap.report import WorkloadSummary, draw, markdown, records_from_json, summarise, to_json
from benchmarks.overlap.workload import LOOKAHEADS, WORKLOADS
from trainer.process import settle_process

__all__ = ["main"]


def main() -> int:
    """Run and report."""
    options = _parse()
    try:
        if options.report:
            records, surroundings = _read(options.out)
        else:
            check_privileges()
            surroundings = _surroundings()
            records = _measure(options, surroundings)
    except InputError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 2
    names = dict.fromkeys(record.workload for record in records)
    summaries = [summarise(WORKLOADS[name], [r for r in records if r.workload == name]) for name in names]
    _write(options.out, summaries, records, surroundings)
    return 0


def _measure(options: argparse.Namespace, surroundings: dict[str, str]) -> list[Record]:
    unknown = [name for name in options.workloads if name not in WORKLOADS]
    if unknown:
        raise InputError(f"--workloads: expected names among {', '.join(WORKLOADS)}, got {unknown[0]!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    settle_process()
    print("\n".join(f"{name}: {value}" for name, value in surroundings.items()), flush=True)
    records: list[Record] = []
    for name in options.workloads:
        own = run_workload(
            WORKLOADS[name],
            lookaheads=options.lookaheads,
            repeats=options.repeats,
            say=lambda line: print(line, flush=True),
            trace_dir=options.trace,
        )
        check_same_work(own)
        records += own
    return records


def _read(folder: Path) -> tuple[list[Record], dict[str, str]]:
    path = folder / "results.json"
    if not path.is_file():
        raise InputError(f"--report: {path} does not exist, measure first")
    value = json.loads(path.read_text())
    return records_from_json(value), value["surroundings"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap.main",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=2, help="times the whole grid is measured")
    parser.add_argument(
        "--lookaheads", type=lambda text: [int(word) for word in text.split(",")], default=list(LOOKAHEADS)
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the results")
    parser.add_argument("--report", action="store_true", help="measure nothing: write --out's results.json up again")
    parser.add_argument("--trace", type=Path, default=None, help="folder for a Perfetto trace of every trial")
    return parser.parse_args()


def _surroundings() -> dict[str, str]:
    return {
        "processor": f"{processor_name()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}",
        "server": server_version(),
        "load average": " ".join(f"{value:.2f}" for value in os.getloadavg()),
    }


def _write(folder: Path, summaries: list[WorkloadSummary], records: list[Record], surroundings: dict[str, str]) -> None:
    (folder / "results.json").write_text(json.dumps(to_json(summaries, records, surroundings)) + "\n")
    tables = "\n".join(markdown(summary) for summary in summaries)
    (folder / "tables.md").write_text(tables)
    print("\n" + tables)
    try:
        draw(summaries, folder / "curve.svg")
    except ModuleNotFoundError as error:
        print(f"no plot: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
