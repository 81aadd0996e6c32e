"""How many ids per second does one cacher on one core sustain, from parsed binary input to N trainers?

    python -m benchmarks.cacher.main [--experiments plan,serve] [--ranks 1,8] [--json FILE]

`plan`: reading, planning, cutting and serialising for all ranks in one process pinned to one core. `serve`: a daemon
pinned to that core, and as many real clients as ranks on the others. Both read an .arrow file of synthetic Criteo at
full scale, which is made once. Rates are over batches in steady state: the window is full and the caches evict.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path

import grpc
import numpy as np

from bagpipe.client.envelope import rank_batch_message
from bagpipe.client.remote import RemoteBatches
from bagpipe.client.slim import slim, values_follow
from bagpipe.config.sections import Assignment, CacheConfig, CacherConfig, Config, DataConfig, OracleConfig
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.schema import DataSchema
from bagpipe.util.machine import processor_name
from cacher.embedded import EmbeddedCacher
from cacher.planning import PlannedData
from cacher.process import settle_process
from trainer.process import peak_rss_bytes

BATCH_SIZE = 16_384
LOOKAHEAD = 200
#: Rows of all ranks' caches together; small enough that the caches evict once the window is full.
CACHE_ROWS = 1_000_000
NUM_ROWS = 200 * BATCH_SIZE
EPOCHS = 4
#: Batches handed out before the clock starts, and on the clock.
WARMUP, MEASURED = 100, 300
CREDITS = 6


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
    assign: Assignment
    million_ids_per_s: float
    million_ids_per_cpu_s: float
    batch_ms: float
    batch_mb: float
    peak_rss_mb: float


def job(path: Path, ranks: int, assign: Assignment) -> Config:
    return Config(
        data=DataConfig(
            format="parquet", path=str(path), batch_size=BATCH_SIZE, epochs=EPOCHS, eval_fraction=0.0, workers=0
        ),
        oracle=OracleConfig(lookahead=LOOKAHEAD),
        cache=CacheConfig(rows=CACHE_ROWS // ranks),
        cacher=CacherConfig(assign=assign),
    )


def spec_of(config: Config, schema: DataSchema, ranks: int) -> OracleSpec:
    return OracleSpec(
        table_rows=tuple(schema.table(feature.table).rows for feature in schema.features),
        features=tuple(FeatureRef(feature=number, table=number) for number in range(len(schema.features))),
        num_slots=config.cache.rows,
        lookahead=config.oracle.lookahead,
        policy=config.oracle.policy,
        world_size=ranks,
        assign=config.cacher.assign,
    )


def plan(path: Path, ranks: int, assign: Assignment) -> Rate:
    """Everything but the network, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_plan, (path, ranks, assign))


def _plan(path: Path, ranks: int, assign: Assignment) -> Rate:
    os.sched_setaffinity(0, {0})
    settle_process()
    config = job(path, ranks, assign)
    data = PlannedData(config.data, config.run.seed)
    batches = data.phase("train", spec_of(config, data.schema, ranks))
    without_values = values_follow(batches.spec, batches.num_features)
    num_ids, num_bytes, start_s, start_cpu_s = 0, 0, 0.0, 0.0
    for batch in batches:
        if batch.batch.index == WARMUP:
            num_ids, num_bytes, start_s, start_cpu_s = 0, 0, time.perf_counter(), time.process_time()
        num_ids += batch.batch.values.size
        for rank in range(ranks):
            num_bytes += len(
                rank_batch_message(0, batch.batch.index, slim(batch.for_rank(rank), without_values=without_values))
            )
        if batch.batch.index == WARMUP + MEASURED - 1:
            break
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    batches.close()
    return _rate("plan", ranks, assign, wall_s, cpu_s, num_ids, num_bytes, peak_rss_bytes() / 2**20)


def serve(path: Path, ranks: int, assign: Assignment) -> Rate:
    """A daemon on the first core, its clients on the others."""
    context = multiprocessing.get_context("spawn")
    config = job(path, ranks, assign)
    barrier, num_ids = context.Barrier(ranks + 1), context.Value("q", 0)
    with EmbeddedCacher(config) as cacher:
        pid = cacher.pid
        assert pid is not None
        os.sched_setaffinity(pid, {0})
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {0})
        clients = [
            context.Process(target=_consume, args=(cacher.url, config, rank, ranks, barrier, num_ids))
            for rank in range(ranks)
        ]
        for client in clients:
            client.start()
        barrier.wait()
        start_s, start_cpu_s = time.perf_counter(), _cpu_s(pid)
        barrier.wait()
        wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s(pid) - start_cpu_s
        peak_rss_mb = peak_rss_bytes(pid) / 2**20
        for client in clients:
            client.join()
    return _rate("serve", ranks, assign, wall_s, cpu_s, num_ids.value, 0, peak_rss_mb)


def _consume(url: str, config: Config, rank: int, ranks: int, barrier: Barrier, num_ids: Synchronized[int]) -> None:
    os.sched_setaffinity(0, set(range(1, os.cpu_count() or 2)))
    with RemoteBatches(url, config, credits=CREDITS, rank=rank, world_size=ranks, job_id="benchmark") as source:
        count = 0
        for step in source.batches("train", spec_of(config, source.schema, ranks)):
            if step.batch.index == WARMUP:
                barrier.wait()
            if step.batch.index == WARMUP + MEASURED:
                with num_ids.get_lock():
                    num_ids.value += count
                barrier.wait()
                return
            count += step.batch.values.size if step.batch.index >= WARMUP else 0


def _rate(
    experiment: str,
    ranks: int,
    assign: Assignment,
    wall_s: float,
    cpu_s: float,
    num_ids: int,
    num_bytes: int,
    peak_rss_mb: float,
) -> Rate:
    million_ids = num_ids / 1e6
    return Rate(
        experiment=experiment,
        ranks=ranks,
        assign=assign,
        million_ids_per_s=round(million_ids / wall_s, 2),
        million_ids_per_cpu_s=round(million_ids / cpu_s, 2),
        batch_ms=round(wall_s / MEASURED * 1e3, 2),
        batch_mb=round(num_bytes / MEASURED / 1e6, 2),
        peak_rss_mb=round(peak_rss_mb),
    )


def _cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


EXPERIMENTS: Mapping[str, Callable[[Path, int, Assignment], Rate]] = {"plan": plan, "serve": serve}


def make_data(path: Path) -> None:
    """The input, unless it is there."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = ["--profile", "criteo-kaggle", "--rows", str(NUM_ROWS), "--out", str(path)]
        subprocess.run([sys.executable, "-m", "data", "synth", *arguments], check=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", default="plan,serve")
    parser.add_argument("--ranks", default="1,8")
    parser.add_argument("--assign", default="contiguous")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each; the median by rate is shown")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("BAGPIPE_DATA", "datasets")) / "kaggle.arrow")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    make_data(options.data)
    cells = [
        (name, int(ranks), assign)
        for name in options.experiments.split(",")
        for ranks in options.ranks.split(",")
        for assign in options.assign.split(",")
    ]
    rates = [
        [EXPERIMENTS[name](options.data, ranks, assign) for name, ranks, assign in cells]
        for _ in range(options.repeats)
    ]
    print("| experiment | ranks | assign | M ids/s | range | M ids per CPU s | ms/batch | MB/batch | peak RSS MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for found in zip(*rates, strict=True):
        ordered = sorted(found, key=lambda rate: rate.million_ids_per_s)
        r = ordered[len(ordered) // 2]
        span = f"{ordered[0].million_ids_per_s}–{ordered[-1].million_ids_per_s}"
        print(
            f"| {r.experiment} | {r.ranks} | {r.assign} | {r.million_ids_per_s} | {span} | {r.million_ids_per_cpu_s} "
            f"| {r.batch_ms} | {r.batch_mb or ''} | {r.peak_rss_mb:.0f} |"
        )
    if options.json:
        machine = {
            "cpu": processor_name(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "grpc": grpc.__version__,
        }
        results = [asdict(rate) for repeat in rates for rate in repeat]
        options.json.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
