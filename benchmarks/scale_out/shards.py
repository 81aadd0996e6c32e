"""Cost of a batch whose tables are indexed in shards: of each shard, and of the cacher's three threads.

    zipf ──ids──> Batch ──narrowed──> BatchIndexer per shard ──IndexedBatch──> join, window ─> decide ─> records
                                                          timed apart, one after the other, in one thread

The times of a shard and of a thread are those of one core each, as if every shard had a host of its own. Reading,
parsing and serialisation are not in it.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch
from bagpipe.oracle.batch_window import LeftBatch, SteppedWindow, WindowAhead, WindowStep
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner
from bagpipe.oracle.shard import MergedIndexer, ShardMerger, assign_tables, shard_spec
from bagpipe.types.batch import Batch
from benchmarks.scale.planning import array_bytes, batches
from benchmarks.scale.points import Point

__all__ = ["ShardCost", "measure_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCost:
    """Medians per batch, of processor time.

    Attributes:
        whole_ms: one `push` and one `plan` of one process that indexes the batch itself.
        shard_ms: of the slowest shard.
        shards_ms: of all shards together.
        join_ms: joining the shards' results, and the window.
        planner_ms: one `push` and one `decide`.
        records_ms: the plan of a decision: records of all ranks.
        shard_mb: bytes of all shards' results.
        plan_mb: bytes of the plan's arrays, for all ranks.
        shard_state_mb: bytes of the arrays that the largest shard holds at the end.
    """

    whole_ms: float
    shard_ms: float
    shards_ms: float
    join_ms: float
    planner_ms: float
    records_ms: float
    shard_mb: float
    plan_mb: float
    shard_state_mb: float


def measure_shards(point: Point, num_shards: int, num_batches: int) -> ShardCost:
    """Plan until the window and the caches are full, then measure `num_batches`."""
    spec = OracleSpec(
        table_rows=(None,) * point.tables,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(point.tables)),
        num_slots=point.cache_rows // point.ranks,
        lookahead=point.lookahead,
        world_size=point.ranks,
    )
    shard_of_table = assign_tables([1.0] * point.tables, num_shards)
    features = [[table for table, its in enumerate(shard_of_table) if its == shard] for shard in range(num_shards)]
    shards = [BatchIndexer(shard_spec(spec, own, own)) for own in features]
    merger, steps = ShardMerger(spec, shard_of_table), WindowAhead(spec)
    joined: list[IndexedBatch] = []
    made: list[WindowStep] = []
    left: deque[LeftBatch] = deque()
    window = SteppedWindow(steps, step=lambda _: made[-1], left=left.popleft)
    planner = Planner(spec, MergedIndexer(spec, lambda _: joined[-1]), window)
    whole = Planner(spec)
    costs: list[tuple[float, ...]] = []
    shard_mb, plan_mb = 0.0, 0.0
    has_evicted = False
    for batch in batches(point):
        parts, times_s = _indexed(shards, features, batch)
        joined, made = joined[:0], made[:0]
        times = [time.thread_time()]
        joined.append(merger.merge(parts))
        made.append(steps.step(joined[0]))
        left += made[0].left
        times.append(time.thread_time())
        planner.push(batch)
        decision = planner.decide() if planner.is_ready else None
        times.append(time.thread_time())
        plan = None if decision is None else decision.plan()
        times.append(time.thread_time())
        whole.push(batch)
        if whole.is_ready:
            whole.plan()
        times.append(time.thread_time())
        join_s, planner_s, records_s, whole_s = (end - start for start, end in itertools.pairwise(times))
        if plan is None or not has_evicted:
            has_evicted = plan is not None and any(len(owner.evict) for owner in plan.owners)
            continue
        costs.append((whole_s, max(times_s), sum(times_s), join_s, planner_s, records_s))
        if len(costs) == num_batches:
            shard_mb = sum(array_bytes(part) for part in parts) / 1e6
            plan_mb = array_bytes(plan) / 1e6
            break
    one, slowest, together, joining, planning, recording = (
        statistics.median(column) * 1e3 for column in zip(*costs, strict=True)
    )
    return ShardCost(
        whole_ms=one,
        shard_ms=slowest,
        shards_ms=together,
        join_ms=joining,
        planner_ms=planning,
        records_ms=recording,
        shard_mb=shard_mb,
        plan_mb=plan_mb,
        shard_state_mb=max(array_bytes(shard) for shard in shards) / 1e6,
    )


def _indexed(
    shards: Sequence[BatchIndexer], features: Sequence[list[int]], batch: Batch
) -> tuple[list[IndexedBatch], list[float]]:
    """The shards' results, and the processor time of each in seconds."""
    parts, times_s = [], []
    by_table = batch.values.reshape(batch.num_features, -1)
    for shard, own in zip(shards, features, strict=True):
        narrowed = dataclasses.replace(
            batch, values=np.ascontiguousarray(by_table[own]).reshape(-1), lengths=batch.lengths[own]
        )
        start = time.thread_time()
        parts.append(shard.index(narrowed))
        times_s.append(time.thread_time() - start)
    return parts, times_s
