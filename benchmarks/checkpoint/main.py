"""What do checkpoints cost: their row files, a training step, and a restart?

    python -m benchmarks.checkpoint.main [--parts rows] [--rows 10000000] [--dim 16] [--repeats 3] [--out DIR]
    python -m benchmarks.checkpoint.main --parts training [--rounds 5] --data.path FILE --data.format criteo-tsv …

`rows` times the row files of one checkpoint. `training` trains the job of trainer/configs/criteo.toml with and without
checkpoints, then kills and restarts it; unknown flags go to the trainer. Run it on an idle machine: the job needs all
of its cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from bagpipe.store.server.embedded import find_server
from benchmarks.checkpoint.row_files import measure_row_files
from benchmarks.checkpoint.training import measure_training
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.report import table

_TRAINING = {
    "mean_ratio": "step with checkpoints / without, mean over the run (target: at most 1.03)",
    "p50_ratio": "the same, median step",
    "stall_per_checkpoint_in_steps": "time that lanes spent copying, per checkpoint, in steps",
    "restart_to_first_step_s": "killed and started again, seconds to the end of the first step (target: 10)",
}


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    known: Mapping[str, Measure] = {
        "rows": partial(_measure_rows, options),
        "training": partial(measure_training, options),
    }
    return {name: known[name] for name in options.parts}


def _measure_rows(options: argparse.Namespace, part: Part) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        part.keep(measure_row_files(Path(folder), options.rows, options.dim, options.repeats))


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=("rows", "training"), default=["rows"])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of training runs")
    parser.add_argument("--every", type=int, default=200, help="steps between checkpoints of the training runs")


def _tables(values: Values) -> str:
    return "\n".join([*_row_tables(values), *_training_tables(values)])


def _row_tables(values: Values) -> Iterator[str]:
    found = found_of(values, "rows")
    if found:
        columns = ("what", "seconds", "mb_per_s", "million_rows_per_s")
        headers = ("what", "seconds", "MB/s of records", "M rows/s")
        yield table(headers, [[result[column] for column in columns] for result in found])


def _training_tables(values: Values) -> Iterator[str]:
    found = found_of(values, "training") or {}
    rows = [(what, f"{found[name]:.2f}") for name, what in _TRAINING.items() if name in found]
    if rows:
        yield table(("what", "value"), rows)


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"rows": 100_000, "repeats": 1},
    packages=("torch", "numpy", "xxhash"),
    machine=lambda options: {"server": find_server().name},
    rest="job",
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
