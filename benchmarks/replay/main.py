"""How many ids a second does `python -m data replay` take on one core, and how many does reading them alone?

    python -m benchmarks.replay.main [--data.path FILE] [--epochs 8] [--out DIR]
    python -m benchmarks.replay.main --report [--out DIR]        the table again, from results.json

--data.path is a file of Criteo's click logs; else $BAGPIPE_CRITEO_SAMPLE. Without either only the synthetic log is
replayed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bagpipe.errors import InputError
from bagpipe.util.machine import processor_name
from benchmarks.readme import fill_in
from data.cli import main as data_program
from data.loader import LookaheadLoader
from data.parquet import ParquetSource

POLICY = "belady-window"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One log cut one way.

    Attributes:
        log: its name. batch_size: examples. lookahead: batches. cache_rows: rows. epochs: passes, as one long log.
    """

    log: str
    batch_size: int
    lookahead: int
    cache_rows: int
    epochs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a case gave: million ids a second by the wall clock, of reading alone and of the whole replay."""

    case: Case
    ids: int
    read: float
    replay: float


def main() -> int:
    """Measure, or report."""
    options = _parse()
    results = options.out / "results.json"
    if not options.report:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        with TemporaryDirectory() as folder:
            try:
                rates = [asdict(rate) for rate in _measure(options, Path(folder))]
            except InputError as error:
                print(f"replay: {error}", file=sys.stderr)
                return 2
        machine = {"cpu": processor_name(), "python": platform.python_version(), "numpy": np.__version__}
        results.write_text(json.dumps({"machine": machine, "rates": rates}, indent=2) + "\n")
    table = _table(json.loads(results.read_text()))
    fill_in(options.out / "README.md", table)
    print(table)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data.path", dest="path", default=os.environ.get("BAGPIPE_CRITEO_SAMPLE", ""))
    parser.add_argument("--epochs", type=int, default=8, help="passes over the log, which make one longer log")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--report", action="store_true")
    return parser.parse_args()


def _measure(options: argparse.Namespace, folder: Path) -> Iterator[Rate]:
    if options.path:
        sample = folder / "sample.arrow"
        _data("convert", options.path, str(sample))
        for batch_size in (512, 1024, 4096):
            case = Case(log="real", batch_size=batch_size, lookahead=32, cache_rows=36_000, epochs=options.epochs)
            yield _rate(case, sample, folder)
    synthetic = folder / "kaggle.arrow"
    _data("synth", "--out", str(synthetic), "--profile", "criteo-kaggle", "--rows", "800000")
    case = Case(
        log="kaggle", batch_size=16_384, lookahead=100, cache_rows=1_000_000, epochs=max(3, options.epochs // 2)
    )
    yield _rate(case, synthetic, folder)


def _rate(case: Case, path: Path, folder: Path) -> Rate:
    """Reading alone, then the replay, on the same file and core."""
    start_s, ids = time.perf_counter(), 0
    with LookaheadLoader(ParquetSource.at(str(path)), batch_size=case.batch_size, epochs=case.epochs) as batches:
        for batch in batches:
            ids += batch.values.shape[0]
    read_s = time.perf_counter() - start_s
    out = folder / "out.json"
    _data(
        "replay", "--data.path", str(path), "--data.format", "parquet", "--data.batch_size", str(case.batch_size),
        "--data.epochs", str(case.epochs), "--lookahead", str(case.lookahead), "--cache_rows", str(case.cache_rows),
        "--policy", POLICY, "--json", str(out),
    )  # fmt: skip
    record = json.loads(out.read_text())[0]
    if record["ids"] != ids:
        raise InputError(f"{path}: read {ids} ids alone and {record['ids']} in the replay")
    return Rate(case=case, ids=ids, read=ids / read_s / 1e6, replay=record["ids_per_s"] / 1e6)


def _data(*words: str) -> None:
    with open(os.devnull, "w") as nowhere:
        code = data_program(words, nowhere)
    if code:
        raise InputError(f"python -m data {words[0]} ended with exit code {code}")


def _table(results: dict[str, list[dict[str, object]]]) -> str:
    lines = [
        "| log | batch size | ids | lookahead | cache rows | reading alone, M ids/s | replay, M ids/s | of reading |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for values in results["rates"]:
        rate = Rate(**{**values, "case": Case(**values["case"])})  # type: ignore[arg-type]
        case = rate.case
        lines.append(
            f"| {case.log} | {case.batch_size:,} | {rate.ids:,} | {case.lookahead} | {case.cache_rows:,} "
            f"| {rate.read:.0f} | {rate.replay:.1f} | {rate.replay / rate.read:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
