"""Part `feed`: the rates at which planner, preparation and stores can feed a device. Also runs without one.

planner      one thread, plans of the cache measured in `steps`
preparation  a step's plan and inputs as tensors of the device: the data lane's work
stores       rows of a step written and read by one client, each alone and both concurrently, as the two lanes do;
             the client's CPU time shows whether the client or its servers limit the rates
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.plain_bags import CachedBags, PlainInputs
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.types.schema import RowSchema
from benchmarks.gpu.cached import fill, store_makers
from benchmarks.gpu.timing import median_s
from benchmarks.gpu.workload import Plan, Workload

__all__ = ["run_feed"]


def run_feed(workload: Workload, plan: Plan, say: Callable[[str], None], keep: Callable[[Any], None]) -> None:
    """Measure; `keep` gets what there is after every store."""
    settings = workload.settings
    steps = plan.steps[settings.warmup_steps : settings.warmup_steps + settings.measured_steps]
    found: dict[str, Any] = {
        "rows_unique": float(np.mean([len(step.consumer.unique) for step in steps])),
        "rows_fetched": float(np.mean([len(step.owner.fetch) for step in steps])),
        "rows_evicted": float(np.mean([len(step.owner.evict) for step in steps])),
        "plan_s": median_s(plan.plan_s[-len(steps) :]),
        "prepare_s": _prepare_s(workload, steps),
        "stores": {},
        "missing": {},
    }
    say(f"feed: a plan {found['plan_s'] * 1e3:.1f} ms, its preparation {found['prepare_s'] * 1e3:.1f} ms")
    keep(found)
    schema = RowSchema(tables=CachedBags(workload.schema, settings.dim).row_tables, optimizer=settings.rows_optimizer)
    for name, open_stores in store_makers(settings.servers).items():
        try:
            with open_stores() as make_store, make_store(schema) as store:
                found["stores"][name] = _rates(store, steps)
        except Exception as error:  # the other stores are still measured
            found["missing"][name] = f"{type(error).__name__}: {error}"
            say(f"feed: without {name} ({error})")
            continue
        say(f"feed: {name}: " + ", ".join(f"{what} {rate:,.4g}" for what, rate in found["stores"][name].items()))
        keep(found)


def _prepare_s(workload: Workload, steps: Sequence[RankBatch]) -> float:
    """Median thread seconds to make a step's tensors and enqueue their uploads."""
    settings = workload.settings
    bags, inputs = CachedBags(workload.schema, settings.dim), PlainInputs(workload.schema)
    schema = RowSchema(tables=bags.row_tables, optimizer=settings.rows_optimizer)
    uploads = RowCache(schema, 1, settings.device).uploads(settings.read_ahead)
    times_s = []
    for step in steps:
        start_s = time.thread_time()
        with uploads.batch() as upload:
            prepare_batch(bags.layout, step.batch, step.consumer, upload=upload)
            inputs(step.batch, upload)
        times_s.append(time.thread_time() - start_s)
    return median_s(times_s)


def _rates(store: Store, steps: Sequence[RankBatch]) -> dict[str, float]:
    """Rows per second and CPU seconds of this process per million rows: read, written, both concurrently."""
    fill(store, steps)
    reads = [_requests(step) for step in steps]
    writes = [
        [
            WriteRequest(table, ids, np.ones((len(ids), store.schema.row_width(table)), np.float32))
            for table, ids in found
        ]
        for found in reads
    ]
    num_rows = sum(len(ids) for found in reads for _, ids in found)

    def read() -> None:
        for found in reads:
            store.read_many(found)

    def write() -> None:
        for found in writes:
            store.write_many(found)

    reading, writing, both = _cost(read), _cost(write), _cost(lambda: _together(read, write))
    return {
        "rows_read_per_s": num_rows / reading.wall_s,
        "rows_written_per_s": num_rows / writing.wall_s,
        "rows_read_and_written_per_s": num_rows / both.wall_s,
        "cpu_s_per_million_read": reading.cpu_s / num_rows * 1e6,
        "cpu_s_per_million_written": writing.cpu_s / num_rows * 1e6,
        "cpu_s_per_million_read_and_written": both.cpu_s / num_rows * 1e6,
    }


def _requests(step: RankBatch) -> list[tuple[int, Any]]:
    fetch = step.owner.fetch
    bounds = fetch.table_offsets.tolist()
    return [(table, fetch.ids[first:end]) for table, (first, end) in enumerate(pairwise(bounds)) if end > first]


def _together(one: Callable[[], object], other: Callable[[], object]) -> None:
    thread = threading.Thread(target=one)
    thread.start()
    other()
    thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Wall seconds, and CPU seconds (user and system) of all threads of this process."""

    wall_s: float
    cpu_s: float


def _cost(run: Callable[[], object]) -> _Cost:
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run()
    return _Cost(wall_s=time.perf_counter() - start_s, cpu_s=time.process_time() - start_cpu_s)
