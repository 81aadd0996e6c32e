"""How fast does `python -m data replay` plan a log, beside reading the log alone?

    python -m benchmarks.replay.main [--data.path FILE] [--epochs 8] [--out DIR]

--data.path is a file of Criteo's click logs; default: $BAGPIPE_CRITEO_SAMPLE. Without either, only the synthetic log is
replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.click_logs import add_data_path
from benchmarks.harness.report import table
from data.cli import main as data_program
from data.loader import LookaheadLoader
from data.parquet import ParquetSource

POLICY = "belady-window"


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    parts: dict[str, Measure] = {}
    if options.path:
        if not Path(options.path).is_file():
            raise InputError(f"--data.path: {options.path} does not exist")
        parts["real"] = partial(_real, options)
    return {**parts, "kaggle": partial(_synthetic, options)}


def _real(options: argparse.Namespace, part: Part) -> None:
    with TemporaryDirectory() as folder:
        sample = Path(folder) / "sample.arrow"
        _data("convert", options.path, str(sample))
        for batch_size in (512, 1024, 4096):
            case = {"batch_size": batch_size, "lookahead": 32, "cache_rows": 36_000, "epochs": options.epochs}
            part.add(_rate({"log": "real", **case}, sample))


def _synthetic(options: argparse.Namespace, part: Part) -> None:
    with TemporaryDirectory() as folder:
        log = Path(folder) / "kaggle.arrow"
        _data("synth", "--out", str(log), "--profile", "criteo-kaggle", "--rows", str(options.rows))
        case = {"batch_size": options.batch_size, "lookahead": options.lookahead, "cache_rows": options.cache_rows}
        part.add(_rate({"log": "kaggle", **case, "epochs": max(3, options.epochs // 2)}, log))


def _rate(case: dict[str, Any], path: Path) -> dict[str, Any]:
    """Million ids per second of wall time of reading alone and of the whole replay, for one file on one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    start_s, ids = time.perf_counter(), 0
    source = ParquetSource.at(str(path))
    with LookaheadLoader(source, batch_size=case["batch_size"], epochs=case["epochs"]) as batches:
        for batch in batches:
            ids += batch.values.shape[0]
    read_s = time.perf_counter() - start_s
    out = path.with_name("out.json")
    _data(
        "replay", "--data.path", str(path), "--data.format", "parquet", "--data.batch_size", str(case["batch_size"]),
        "--data.epochs", str(case["epochs"]), "--lookahead", str(case["lookahead"]),
        "--cache_rows", str(case["cache_rows"]), "--policy", POLICY, "--json", str(out),
    )  # fmt: skip
    record = json.loads(out.read_text())[0]
    if record["ids"] != ids:
        raise InputError(f"{path}: expected {ids} ids, as read alone, got {record['ids']} in the replay")
    return {**case, "ids": ids, "read": ids / read_s / 1e6, "replay": record["ids_per_s"] / 1e6}


def _data(*words: str) -> None:
    with open(os.devnull, "w") as nowhere:
        code = data_program(words, nowhere)
    if code:
        raise InputError(f"python -m data {words[0]} ended with exit code {code}")


def _flags(parser: argparse.ArgumentParser) -> None:
    add_data_path(parser)
    parser.add_argument("--epochs", type=int, default=8, help="passes over the log, which make one longer log")
    parser.add_argument("--rows", type=int, default=800_000, help="examples of the synthetic log")
    parser.add_argument("--batch-size", type=int, default=16_384, help="of the synthetic log")
    parser.add_argument("--lookahead", type=int, default=100, help="over the synthetic log")
    parser.add_argument("--cache-rows", type=int, default=1_000_000, help="for the synthetic log")


def _tables(values: Values) -> str:
    headers = ("log", "batch size", "ids", "lookahead", "cache rows", "reading alone, M ids/s", "replay, M ids/s")
    rates = [rate for part in values["parts"].values() for rate in part.get("found") or []]
    return table(
        (*headers, "of reading"),
        [
            (
                rate["log"],
                f"{rate['batch_size']:,}",
                f"{rate['ids']:,}",
                rate["lookahead"],
                f"{rate['cache_rows']:,}",
                f"{rate['read']:.0f}",
                f"{rate['replay']:.1f}",
                f"{rate['replay'] / rate['read']:.2f}",
            )
            for rate in rates
        ],
    )


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"path": "", "epochs": 3, "rows": 8_192, "batch_size": 512, "lookahead": 8, "cache_rows": 50_000},
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
