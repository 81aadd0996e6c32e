"""How many ids per second does one cacher on one core sustain, from parsed binary input to N trainers?

    python -m benchmarks.cacher.main [--experiments plan serve] [--ranks 1 8] [--assign locality] [--out DIR]

`plan` reads, plans, cuts and serialises for all ranks in one process pinned to one core. `serve` runs a daemon pinned
to that core, and one real client per rank on the other cores. Both read an .arrow file of synthetic Criteo at full
scale, which is generated once. Rates cover batches in steady state: the window is full and the caches evict.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bagpipe.calibration.cacher import oracle_spec
from bagpipe.client.codec import values_are_derivable
from bagpipe.client.message import encode_message
from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Assignment, CacheConfig, CacherConfig, Config, DataConfig, OracleConfig
from bagpipe.oracle.plan import OracleSpec
from bagpipe.types.schema import DataSchema
from bagpipe.util.processor_time import process_s
from benchmarks.harness.benchmark import Benchmark, Measure, Part, Values, run_benchmark
from benchmarks.harness.report import table
from benchmarks.harness.rounds import turns
from cacher.embedded import EmbeddedCacher
from cacher.planning import PlannedData
from cacher.process import configure_process
from trainer.process import peak_rss_bytes

EPOCHS = 4
CREDITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One measurement's settings.

    Attributes:
        path: of the data.
        ranks: consumers.
        assign: how examples are assigned to them.
        batch_size: examples of a global batch.
        lookahead: batches in the window.
        cache_rows: of all ranks' caches together; small enough that they evict once the window is full.
        warmup, measured: batches before the clock starts, and on the clock.
    """

    path: Path
    ranks: int
    assign: Assignment
    batch_size: int
    lookahead: int
    cache_rows: int
    warmup: int
    measured: int

    def job(self) -> Config:
        """The job's configuration."""
        data = DataConfig(
            format="parquet",
            path=str(self.path),
            batch_size=self.batch_size,
            epochs=EPOCHS,
            eval_fraction=0.0,
            workers=0,
        )
        return Config(
            data=data,
            oracle=OracleConfig(lookahead=self.lookahead),
            cache=CacheConfig(rows=self.cache_rows // self.ranks),
            cacher=CacherConfig(assign=self.assign),
        )

    def spec(self, schema: DataSchema) -> OracleSpec:
        """The specification of the plans of the job's oracle."""
        return oracle_spec(self.job(), schema, self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measurement.

    Attributes:
        experiment: plan or serve.
        ranks: consumers.
        assign: how examples are assigned to them.
        million_ids_per_s: ids of the global batches (missing ones do not count) per second of wall time.
        million_ids_per_cpu_s: the same per second of the cacher process's CPU time.
        batch_ms: wall time per global batch.
        batch_mb: serialised bytes per global batch, all ranks, 1e6.
        peak_rss_mb: of the cacher process.
    """

    experiment: str
    ranks: int
    assign: str
    million_ids_per_s: float
    million_ids_per_cpu_s: float
    batch_ms: float
    batch_mb: float
    peak_rss_mb: float


def plan(cell: Cell) -> Rate:
    """Everything but the network, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_plan, (cell,))


def _plan(cell: Cell) -> Rate:
    os.sched_setaffinity(0, {0})
    configure_process()
    config = cell.job()
    data = PlannedData(config.data, config.run.seed)
    batches = data.phase("train", cell.spec(data.schema))
    omit_values = values_are_derivable(batches.spec, batches.num_features)
    num_ids, num_bytes, start_s, start_cpu_s = 0, 0, 0.0, 0.0
    for batch in batches:
        if batch.batch.index == cell.warmup:
            num_ids, num_bytes, start_s, start_cpu_s = 0, 0, time.perf_counter(), time.process_time()
        num_ids += batch.batch.values.size
        for rank in range(cell.ranks):
            rank_batch = batch.for_rank(rank, without_ids=omit_values)
            num_bytes += len(encode_message(0, batch.batch.index, rank_batch, omit_values=omit_values))
        if batch.batch.index == cell.warmup + cell.measured - 1:
            break
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    batches.close()
    return _rate("plan", cell, wall_s, cpu_s, num_ids, num_bytes, peak_rss_bytes() / 2**20)


def serve(cell: Cell) -> Rate:
    """A daemon on the first core, its clients on the others."""
    context = multiprocessing.get_context("spawn")
    barrier, num_ids = context.Barrier(cell.ranks + 1), context.Value("q", 0)
    with EmbeddedCacher(cell.job()) as cacher:
        pid = cacher.pid
        assert pid is not None
        os.sched_setaffinity(pid, {0})
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {0})
        clients = [
            context.Process(target=_consume, args=(cacher.url, cell, rank, barrier, num_ids))
            for rank in range(cell.ranks)
        ]
        for client in clients:
            client.start()
        barrier.wait()
        start_s, start_cpu_s = time.perf_counter(), process_s(pid)
        barrier.wait()
        wall_s, cpu_s = time.perf_counter() - start_s, process_s(pid) - start_cpu_s
        peak_rss_mb = peak_rss_bytes(pid) / 2**20
        for client in clients:
            client.join()
    return _rate("serve", cell, wall_s, cpu_s, num_ids.value, 0, peak_rss_mb)


def _consume(url: str, cell: Cell, rank: int, barrier: Barrier, num_ids: Synchronized[int]) -> None:
    os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)))
    job = cell.job()
    with RemoteBatches(url, job, credits=CREDITS, rank=rank, world_size=cell.ranks, job_id="benchmark") as source:
        count = 0
        for step in source.batches("train", cell.spec(source.schema)):
            if step.batch.index == cell.warmup:
                barrier.wait()
            if step.batch.index == cell.warmup + cell.measured:
                with num_ids.get_lock():
                    num_ids.value += count
                barrier.wait()
                return
            count += step.batch.values.size if step.batch.index >= cell.warmup else 0


def _rate(
    experiment: str, cell: Cell, wall_s: float, cpu_s: float, num_ids: int, num_bytes: int, peak_rss_mb: float
) -> Rate:
    million_ids = num_ids / 1e6
    return Rate(
        experiment=experiment,
        ranks=cell.ranks,
        assign=cell.assign,
        million_ids_per_s=round(million_ids / wall_s, 2),
        million_ids_per_cpu_s=round(million_ids / cpu_s, 2),
        batch_ms=round(wall_s / cell.measured * 1e3, 2),
        batch_mb=round(num_bytes / cell.measured / 1e6, 2),
        peak_rss_mb=round(peak_rss_mb),
    )


EXPERIMENTS: Mapping[str, Callable[[Cell], Rate]] = {"plan": plan, "serve": serve}


def make_data(path: Path, rows: int) -> None:
    """Generate the input unless it exists."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--profile", "criteo-kaggle", "--rows", str(rows), "--out", str(path)]
        subprocess.run([sys.executable, "-m", "data", "synth", *arguments], check=True)


def _parts(options: argparse.Namespace) -> Mapping[str, Measure]:
    return {assign: partial(_measure, options, assign) for assign in options.assign}


def _measure(options: argparse.Namespace, assign: Assignment, part: Part) -> None:
    make_data(options.data, options.data_rows)
    measured = {f"{name}, {ranks} ranks": (name, ranks) for name in options.experiments for ranks in options.ranks}
    for repeat, label in turns(list(measured), options.repeats):
        name, ranks = measured[label]
        cell = Cell(
            path=options.data,
            ranks=ranks,
            assign=assign,
            batch_size=options.batch_size,
            lookahead=options.lookahead,
            cache_rows=options.cache_rows,
            warmup=options.warmup,
            measured=options.measured,
        )
        rate = EXPERIMENTS[name](cell)
        part.add(asdict(rate))
        part.say(f"#{repeat} {label}, {assign}: {rate.million_ids_per_s} M ids/s")


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--experiments", nargs="+", choices=sorted(EXPERIMENTS), default=["plan", "serve"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--assign", nargs="+", choices=("contiguous", "locality"), default=["contiguous"])
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the median by rate is shown")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BAGPIPE_DATA", "datasets")) / "kaggle.arrow")
    parser.add_argument("--data-rows", type=int, default=200 * 16_384, help="examples of --data if it is generated")
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--lookahead", type=int, default=200)
    parser.add_argument("--cache-rows", type=int, default=1_000_000, help="of all ranks' caches together")
    parser.add_argument("--warmup", type=int, default=100, help="batches before the clock starts")
    parser.add_argument("--measured", type=int, default=300, help="batches on the clock")


def _tables(values: Values) -> str:
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for part in values["parts"].values():
        for rate in part.get("found") or []:
            runs.setdefault((rate["experiment"], rate["ranks"], rate["assign"]), []).append(rate)
    headers = ("experiment", "ranks", "assign", "M ids/s", "range", "M ids per CPU s", "ms/batch", "MB/batch")
    return table((*headers, "peak RSS MB"), [_row(group) for group in runs.values()])


def _row(runs: list[dict[str, Any]]) -> tuple[object, ...]:
    """The run with the median rate, and the range of all."""
    ordered = sorted(runs, key=lambda rate: float(rate["million_ids_per_s"]))
    median = ordered[len(ordered) // 2]
    span = f"{ordered[0]['million_ids_per_s']}–{ordered[-1]['million_ids_per_s']}" if len(runs) > 1 else None
    names = ("experiment", "ranks", "assign", "million_ids_per_s")
    rest = (median["million_ids_per_cpu_s"], median["batch_ms"], median["batch_mb"] or None, median["peak_rss_mb"])
    return (*(median[name] for name in names), span, *rest)


BENCHMARK = Benchmark(
    folder=Path(__file__).parent,
    about=__doc__,
    flags=_flags,
    parts=_parts,
    tables=_tables,
    rehearsal={
        "ranks": [2],
        "repeats": 1,
        "data": Path(__file__).parent / "rehearsal" / "kaggle.arrow",
        "data_rows": 8_192,
        "batch_size": 256,
        "lookahead": 8,
        "cache_rows": 20_000,
        "warmup": 10,
        "measured": 20,
    },
    packages=("numpy", "grpcio"),
)

if __name__ == "__main__":
    sys.exit(run_benchmark(BENCHMARK))
