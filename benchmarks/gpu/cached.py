"""One cached run: the engine over a store, measured in steady state.

fill the store with the rows that the timed steps fetch ──> train the planned steps ──> device time between the ends
of consecutive steps, rows, what each lane was busy with
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bagpipe.kernels.initialization import initial_weights
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.store.server.embedded import EmbeddedServer
from bagpipe.testing.plain_job import PlainJob
from bagpipe.training.progress import Progress
from bagpipe.types.schema import RowSchema
from benchmarks.gpu.array_store import ArrayStore
from benchmarks.gpu.timing import Clock, median_s, open_clock
from benchmarks.gpu.workload import Workload

__all__ = ["MakeStore", "fill", "open_servers", "run_cached", "store_makers"]

MakeStore = Callable[[RowSchema], Store]

_FILL_ROWS = 100_000


@contextmanager
def open_servers(count: int) -> Iterator[MakeStore]:
    """Private servers on this host; yields what makes a fenced store over all. InputError: there is no binary."""
    from benchmarks.harness.fenced_store import FencedStore  # needs redis, which machines with a GPU may lack

    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="bagpipe-gpu-") as folder:
        urls = [stack.enter_context(EmbeddedServer(Path(folder) / f"server-{number}")).url for number in range(count)]
        yield lambda schema: FencedStore(",".join(urls), namespace="gpu", schema=schema)


@contextmanager
def _memory() -> Iterator[MakeStore]:
    yield ArrayStore


def store_makers(servers: Sequence[int]) -> dict[str, Callable[[], Any]]:
    """Context managers that yield a `MakeStore`, by name."""

    def over(count: int) -> Callable[[], Any]:
        return lambda: open_servers(count)

    return {"process memory": _memory, **{f"{n} server{'s' if n > 1 else ''}": over(n) for n in servers}}


def fill(store: Store, steps: Sequence[RankBatch]) -> int:
    """Write the initial values of the rows that these steps fetch; returns their number."""
    schema, count = store.schema, 0
    for table, row_table in enumerate(schema.tables):
        ids = np.unique(np.concatenate([_fetched(step, table) for step in steps]))
        count += len(ids)
        for first in range(0, len(ids), _FILL_ROWS):
            chunk = ids[first : first + _FILL_ROWS]
            rows = np.zeros((len(chunk), schema.row_width(table)), np.float32)
            rows[:, : row_table.dim] = initial_weights(row_table, chunk, seed=schema.seed).numpy()
            store.write_many([WriteRequest(table=table, ids=chunk, rows=rows)])
    return count


def _fetched(step: RankBatch, table: int) -> NDArray[np.int64]:
    fetch = step.owner.fetch
    return fetch.ids[int(fetch.table_offsets[table]) : int(fetch.table_offsets[table + 1])]


@dataclass(slots=True)
class _Marks:
    """Records the device time of every step's end, and the totals after some steps."""

    clock: Clock
    at: frozenset[int]
    ends: list[Any]
    totals: dict[int, Progress]

    def __call__(self, totals: Callable[[], Progress]) -> None:
        self.ends.append(self.clock.mark())
        if len(self.ends) in self.at:
            self.totals[len(self.ends)] = totals()


def run_cached(
    workload: Workload, steps: Sequence[RankBatch], make_store: MakeStore, *, trace: Trace | None = None
) -> dict[str, Any]:
    """Train the steps over a store.

    Returns:
        step_s: of each timed step. rows_unique, rows_fetched, rows_written, exposed_s: per timed step (the last:
        see `Progress`). lanes_s: seconds each lane was busy per step of the whole run (on a device: enqueueing). loss:
        mean over all examples.
    """
    settings = workload.settings
    first, last = settings.warmup_steps, settings.warmup_steps + settings.measured_steps
    timed = steps[first:last]
    with open_clock(torch.device(settings.device)) as clock:
        marks = _Marks(clock, frozenset((first, last)), [], {})
        with PlainJob(workload.job(workload.cache_rows), make_store=make_store, trace=trace) as job:
            job.store.claim()  # before the engine does, so that it reads every row: none is known to be new
            num_filled = fill(job.store, timed)
            result = job.engine.train(iter(steps), on_batch=marks)
        step_s = clock.seconds(list(pairwise(marks.ends[first - 1 : last])))
    before, after = marks.totals[first], marks.totals[last]

    def per_step(name: str) -> float:
        return float(getattr(after, name) - getattr(before, name)) / settings.measured_steps

    return {
        "step_s": step_s,
        "step_p50_s": median_s(step_s),
        "rows_filled": num_filled,
        "rows_unique": per_step("rows_unique"),
        # By the plan: the lanes that read and write are some batches away from the one that ends.
        "rows_fetched": sum(len(step.owner.fetch) for step in timed) / len(timed),
        "rows_written": sum(len(step.owner.evict) for step in timed) / len(timed),
        "exposed_s": per_step("exposed_s"),
        "lanes_s": {name: lane.busy_s / len(steps) for name, lane in result.report.lanes.items()},
        "loss": float(result.progress.loss_sum) / result.progress.samples,
    }
