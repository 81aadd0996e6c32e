"""Workload of the steps: the paper's DLRM on Criteo Kaggle's 26 tables, ids drawn with the skews of its logs.

    SyntheticSource ──batches──> planner ──> steps of a cache that has been used

Batches are drawn and planned before anything is timed: a planner in one process can be slower than the device. Every
example has one id per table, as in the paper's data, where a missing value is an id of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bagpipe.oracle.plan import OracleSpec
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.testing.plain_job import PlainSettings, plan_rank_batches
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Table
from benchmarks.gpu.settings import Settings
from data.criteo_skew import criteo_kaggle_rows
from data.synthetic import SyntheticSource
from data.synthetic_options import options_at

__all__ = ["Plan", "Workload", "make_plan", "make_workload"]

#: Tables up to this size are not scaled down.
_SMALL_ROWS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tables and batches.

    Attributes:
        settings: of the benchmark.
        schema: of the data.
        source: of the batches.
        total_rows: of all tables.
    """

    settings: Settings
    schema: DataSchema
    source: SyntheticSource
    total_rows: int

    @property
    def cache_rows(self) -> int:
        return int(self.total_rows * self.settings.cache_share)

    def batches(self, count: int) -> Iterator[Batch]:
        """The first `count` batches, drawn lazily from blocks of the source, without a reader."""
        index = 0
        for segment in self.source.segments():
            for block in self.source.blocks(segment):
                columns = self.source.read(block)
                for first in range(
                    0,
                    self.settings.batch_size * (len(columns.labels) // self.settings.batch_size),
                    self.settings.batch_size,
                ):
                    if index == count:
                        return
                    part = slice(first, first + self.settings.batch_size)
                    values = columns.values.reshape(columns.lengths.shape)[:, part]
                    yield Batch(
                        index=index,
                        dense=columns.dense[part],
                        values=values.reshape(-1),
                        lengths=columns.lengths[:, part].copy(),
                        labels=columns.labels[part],
                    )
                    index += 1

    def job(self, cache_rows: int) -> PlainSettings:
        """The job that trains them."""
        settings = self.settings
        return PlainSettings(
            schema=self.schema,
            device=settings.device,
            cache_rows=cache_rows,
            lookahead=settings.lookahead,
            prefetch_depth=settings.prefetch_depth,
            read_ahead=settings.read_ahead,
            dim=settings.dim,
            bottom_mlp=settings.bottom_mlp,
            top_mlp=settings.top_mlp,
            rows=settings.rows_optimizer,
            rows_lr=0.01,
            dense_lr=0.01,
            seed=settings.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Steps planned ahead of time.

    Attributes:
        steps: all of them.
        plan_s: seconds of the planner's thread for each step once the window is full.
    """

    steps: list[RankBatch]
    plan_s: list[float]


def make_workload(settings: Settings) -> Workload:
    """The workload of these sizes."""
    options = options_at("", profile="criteo-kaggle")
    sizes = {
        name: rows if rows <= _SMALL_ROWS else max(_SMALL_ROWS, rows // settings.table_scale)
        for name, rows in criteo_kaggle_rows().items()
    }
    schema = dataclasses.replace(
        options.schema, tables=tuple(Table(name=table.name, rows=sizes[table.name]) for table in options.schema.tables)
    )
    features = tuple(
        dataclasses.replace(feature, missing=0.0, law=dataclasses.replace(feature.law, vocabulary=sizes[table.name]))
        for feature, table in zip(options.features, schema.tables, strict=True)
    )
    num_batches = settings.num_steps + settings.lookahead
    source = SyntheticSource(
        schema=schema, features=features, rows=settings.batch_size * (num_batches + 64), seed=settings.seed
    )
    return Workload(settings=settings, schema=schema, source=source, total_rows=sum(sizes.values()))


def make_plan(workload: Workload, spec: OracleSpec, say: Callable[[str], None]) -> Plan:
    """Draw and plan the steps of a cached run: once to measure planning, once to keep the plans."""
    settings = workload.settings
    num_batches = settings.num_steps + settings.lookahead
    start_s = time.perf_counter()
    batches = list(workload.batches(num_batches))
    say(f"steps: drew {len(batches)} batches in {time.perf_counter() - start_s:.0f} s")
    plan_s = _plan_s(batches, spec, settings.num_steps)
    say(f"steps: planned {settings.num_steps} steps in {sum(plan_s):.0f} s")
    steps = list(itertools.islice(plan_rank_batches(batches, spec), settings.num_steps))
    return Plan(steps=steps, plan_s=plan_s[1:])


def _plan_s(batches: Sequence[Batch], spec: OracleSpec, num_steps: int) -> list[float]:
    """Seconds of the thread for each step; the first has the window to fill.

    Every plan is dropped when the next is made, as in a job. Keeping them would touch fresh memory: 1,100 page faults a
    plan, which can cost more than planning on a virtual machine.
    """
    plan_s: list[float] = []
    before_s = time.thread_time()
    for _ in itertools.islice(plan_rank_batches(batches, spec), num_steps):
        now_s = time.thread_time()
        plan_s.append(now_s - before_s)
        before_s = now_s
    return plan_s
