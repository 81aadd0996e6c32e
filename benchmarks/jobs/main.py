"""Speed of convert and replay in several processes, against one.

    python -m benchmarks.jobs.main [--parts convert replay] [--jobs 1 2] [--rounds 5] [--out DIR]

`convert` converts a folder of Criteo's text, `replay` replays the default windows, caches and policies of one log. The
numbers of processes take turns, and each round compares them. The outputs must be the same. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.report import table
from benchmarks.harness.rounds import medians, paired_ratios, turns

#: Fields of a record that a clock decides.
TIMES = ("seconds", "ids_per_s")


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    known: Mapping[str, Measure] = {"convert": partial(_convert, options), "replay": partial(_replay, options)}
    return {name: known[name] for name in options.parts}


def _convert(options: argparse.Namespace, part: Part) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        days = Path(folder) / "days"
        for number in range(options.files):
            rows = options.rows // options.files
            _data("synth", "--out", str(days / f"day_{number}.tsv"), "--rows", str(rows), "--seed", str(number))
        part.say(f"{options.files} files of {options.rows // options.files:,} examples")

        def run(jobs: str, name: str) -> str:
            out = Path(folder) / name
            _data("convert", str(days), str(out), "--jobs", jobs)
            digest = _digest_of_folder(out)
            for path in out.iterdir():
                path.unlink()
            return digest

        _measure(options, part, run)


def _replay(options: argparse.Namespace, part: Part) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        log, out = Path(folder) / "log.arrow", Path(folder) / "out.json"
        _data("synth", "--out", str(log), "--profile", "criteo-kaggle", "--rows", str(options.replay_rows))

        def run(jobs: str, name: str) -> str:
            flags = ("--data.path", str(log), "--data.format", "parquet", "--data.batch_size", str(options.batch_size))
            _data("replay", *flags, "--json", str(out), "--jobs", jobs)
            records = json.loads(out.read_text())
            return _digest([{key: record[key] for key in record if key not in TIMES} for record in records])

        _measure(options, part, run)


def _measure(options: argparse.Namespace, part: Part, run: Callable[[str, str], str]) -> None:
    """Seconds by number of processes and round; the outputs of all runs are equal."""
    names = [str(jobs) for jobs in options.jobs]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    digests: dict[str, str] = {}
    for number, name in turns(names, options.rounds):
        start_s = time.perf_counter()
        digests[name] = run(name, f"out-{number}-{name}")
        seconds[name].append(time.perf_counter() - start_s)
        part.say(f"{name} processes: {seconds[name][-1]:.1f} s")
        if len({*digests.values()}) > 1:
            raise InputError(f"the outputs of {' and '.join(digests)} processes differ")
    part.keep(seconds)


def _data(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "data", *words], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"python -m data {words[0]} ended with {done.returncode}: {done.stderr.strip()}")


def _digest_of_folder(folder: Path) -> str:
    """Of the names and contents of its files."""
    return _digest([[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in sorted(folder.iterdir())])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=("convert", "replay"), default=["convert", "replay"])
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2], help="numbers of processes, the first is 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=16, help="of the text")
    parser.add_argument("--rows", type=int, default=6_400_000, help="examples of the text")
    parser.add_argument("--replay-rows", type=int, default=300_000, help="examples of the replayed log")
    parser.add_argument("--batch-size", type=int, default=1_024, help="of the replay")
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: the temporary folder)")


def _tables(values: Values) -> str:
    headers = ("command", "processes", "seconds, median", "times as fast as one, median of the rounds", "least, most")
    return table(headers, [*_rows(values)])


def _rows(values: Values) -> Iterator[tuple[str, ...]]:
    for command, found in values["parts"].items():
        seconds: Mapping[str, list[float]] = found.get("found") or {}
        if "1" not in seconds:
            continue
        for name, median_s in medians(seconds).items():
            ratios = paired_ratios(seconds["1"], seconds[name])
            spread = "" if name == "1" else f"{ratios.least:.2f}, {ratios.most:.2f}"
            yield f"`{command}`", name, f"{median_s:.1f}", f"{ratios.median:.2f}", spread


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={"rounds": 1, "files": 2, "rows": 2_000, "replay_rows": 20_000, "batch_size": 256},
    packages=("numpy", "pyarrow"),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
