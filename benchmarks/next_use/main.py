"""Cost of `convert --next-use` beside a plain conversion, and of plans that use it beside those that do not.

    python -m benchmarks.next_use.main [--parts file folder planning] [--millions 10 21 100] [--rounds 3] [--out DIR]

`file` converts the first examples of one synthetic log of Criteo Kaggle's shape into one file: plain, annotated in the
default memory, and annotated in the least. `folder` converts two files into a folder, in one process and in two. All
take turns, and each round compares them. `planning` plans the same batches with `oracle.horizon` log and window, in
turn. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from bagpipe.errors import InputError
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, found_of, run_benchmark
from benchmarks.harness.processor_use import process_tree
from benchmarks.harness.report import table
from benchmarks.harness.rounds import paired_ratios, turns
from benchmarks.next_use.horizons import measure_horizons

#: Ids of an example of Criteo.
IDS = 26
PLAIN = "plain"
PARTS = ("file", "folder", "planning")
FIGURES = ("cpu_s", "wall_s", "peak_mib")
_POLL_S = 0.05


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    known = {"file": _file, "folder": _folder, "planning": _planning}
    return {name: partial(known[name], options) for name in options.parts}


def _planning(options: argparse.Namespace, part: Part) -> None:
    sizes = {
        "batch_size": options.batch_size,
        "lookahead": options.lookahead,
        "cache_rows": options.cache_rows,
        "count": options.batches,
    }
    part.keep({**sizes, **measure_horizons(**sizes)})


def _file(options: argparse.Namespace, part: Part) -> None:
    flags = {PLAIN: [], "1 GiB": ["--next-use"], "512 MiB": ["--next-use", "--memory", "512MiB"]}
    sizes = [round(millions * 1e6 / IDS) for millions in options.millions]
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        log, out = Path(folder) / "log.tsv", Path(folder) / "out.parquet"
        _synth(log, max(sizes), 0)
        for rows in sizes:
            millions = f"{rows * IDS / 1e6:.3g}"
            found[millions] = {name: [] for name in flags}
            for _, name in turns(list(flags), options.rounds):
                run = _run("convert", str(log), str(out), "--limit", str(rows), *flags[name])
                found[millions][name].append(run)
                part.say(f"{millions} M ids, {name}: {_line(run)}")
                part.keep(found)
                out.unlink()


def _folder(options: argparse.Namespace, part: Part) -> None:
    rows = round(max(options.millions) * 1e6 / IDS) // 2
    flags = {
        f"{name}, {jobs}": [*more, "--jobs", str(jobs)]
        for jobs in options.jobs
        for name, more in ((PLAIN, []), ("1 GiB", ["--next-use"]))
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in flags}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        logs, out = [Path(folder) / f"day_{number}.tsv" for number in range(2)], Path(folder) / "out"
        for number, log in enumerate(logs):
            _synth(log, rows, number)
        for _, name in turns(list(flags), options.rounds):
            run = _run("convert", *map(str, logs), str(out), *flags[name])
            found[name].append(run)
            part.say(f"{2 * rows * IDS / 1e6:.0f} M ids, {name} processes: {_line(run)}")
            part.keep({f"{2 * rows * IDS / 1e6:.3g}": found})
            shutil.rmtree(out)


def _synth(path: Path, rows: int, seed: int) -> None:
    _run("synth", "--out", str(path), "--profile", "criteo-kaggle", "--rows", str(rows), "--seed", str(seed))


def _run(*words: str) -> dict[str, float]:
    """Processor and wall seconds of a command and its processes, and their memory at its peak, in MiB."""
    start_s, peak_kib = time.perf_counter(), 0
    with subprocess.Popen([sys.executable, "-m", "data", *words], stdout=subprocess.DEVNULL) as process:
        ended = os.pidfd_open(process.pid)
        try:
            while not select.select([ended], [], [], _POLL_S)[0]:
                peak_kib = max(peak_kib, sum(map(_rss_kib, process_tree([process.pid]))))
        finally:
            os.close(ended)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise InputError(f"python -m data {words[0]} ended with {process.returncode}")
    return {
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.perf_counter() - start_s,
        "peak_mib": max(peak_kib, usage.ru_maxrss) / 1024,
    }


def _rss_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def _line(run: Mapping[str, float]) -> str:
    return f"{run['cpu_s']:.1f} s of processors, {run['wall_s']:.1f} s, {run['peak_mib']:.0f} MiB"


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--millions", nargs="+", type=float, default=[10, 21, 100], help="ids of the log")
    parser.add_argument("--jobs", nargs="+", type=int, default=[1, 2], help="processes of the folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16_384, help="of the planned batches")
    parser.add_argument("--lookahead", type=int, default=200, help="batches of the planners' window")
    parser.add_argument("--cache-rows", type=int, default=1_000_000, help="of the planners")
    parser.add_argument("--batches", type=int, default=500, help="that are planned")
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: the temporary folder)")


def _tables(values: Values) -> str:
    headers = (
        "million ids",
        "conversion",
        "processor seconds",
        "of plain",
        "wall seconds",
        "of plain",
        "peak MiB",
        "more processor ns an id",
    )
    found = [table(headers, [*_rows(values)])]
    planning = found_of(values, "planning")
    if planning:
        heads = ("rows in the cache", "batches", "compared", "horizon window, plan ms", "log, plan ms", "log / window")
        row = [f"{planning[name]:.3g}" for name in ("window_ms", "log_ms", "ratio")]
        found.append(table(heads, [(f"{planning['cache_rows']:,}", planning["count"], planning["compared"], *row)]))
    return "\n\n".join(found)


def _rows(values: Values) -> Iterator[tuple[str, ...]]:
    for kind in PARTS[:2]:
        measured = values["parts"].get(kind, {})
        for millions, found in (measured.get("found") or {}).items():
            for name, runs in found.items():
                base = found[name.replace("1 GiB", PLAIN).replace("512 MiB", PLAIN)]
                if not runs or not base:
                    continue
                kind_of = "one file" if kind == "file" else "folder"
                yield millions, f"{kind_of}: {name}", *_figures(runs, base, float(millions))


def _figures(
    runs: Sequence[Mapping[str, float]], base: Sequence[Mapping[str, float]], millions: float
) -> Iterator[str]:
    rounds = min(len(runs), len(base))  # of a run that was cut short
    cpu_s, wall_s, peak_mib = ([run[figure] for run in runs[:rounds]] for figure in FIGURES)
    base_cpu_s, base_wall_s = ([run[figure] for run in base[:rounds]] for figure in FIGURES[:2])
    is_plain = runs is base
    yield f"{statistics.median(cpu_s):.1f}"
    yield "" if is_plain else f"{paired_ratios(cpu_s, base_cpu_s).median:.2f}"
    yield f"{statistics.median(wall_s):.1f}"
    yield "" if is_plain else f"{paired_ratios(wall_s, base_wall_s).median:.2f}"
    yield f"{max(peak_mib):.0f}"
    more_s = statistics.median(cpu_s) - statistics.median(base_cpu_s)
    yield "" if is_plain else f"{more_s * 1e3 / millions:.0f}"


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={
        "rounds": 1,
        "millions": [0.05, 0.1],
        "batch_size": 256,
        "lookahead": 8,
        "cache_rows": 20_000,
        "batches": 40,
    },
    packages=("numpy", "pyarrow"),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
