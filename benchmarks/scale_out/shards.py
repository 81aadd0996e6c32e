"""Cost of a batch whose tables are indexed in shards: of each shard, and of the planner that joins their results.

    zipf ──ids──> Batch ──narrowed──> ShardIndexer per shard ──IndexedBatch──> Planner      timed apart, one after the
                                                                                          other, in one thread

A shard's time and the planner's are those of one core each, as if every shard had a host of its own. Reading, parsing
and serialisation are not in it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner
from bagpipe.oracle.shard import MergedIndexer, ShardIndexer, ShardMerger, assign_tables
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
        planner_ms: joining the shards' results, one `push` and one `plan`.
        shard_mb: bytes of all shards' results.
        plan_mb: bytes of the plan's arrays, for all ranks.
        shard_state_mb: bytes of the arrays that the largest shard holds at the end.
    """

    whole_ms: float
    shard_ms: float
    shards_ms: float
    planner_ms: float
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
    shards = [ShardIndexer(spec, own, own) for own in features]
    parts: list[IndexedBatch] = []
    merger = ShardMerger(spec, shard_of_table)
    planner = Planner(spec, MergedIndexer(spec, lambda _: merger.merge(parts)))
    whole = Planner(spec)
    costs: list[tuple[float, float, float, float]] = []
    shard_mb, plan_mb = 0.0, 0.0
    has_evicted = False
    for batch in batches(point):
        parts, times_s = _indexed(shards, features, batch)
        start = time.thread_time()
        planner.push(batch)
        plan = planner.plan() if planner.is_ready else None
        planned_at = time.thread_time()
        whole.push(batch)
        if whole.is_ready:
            whole.plan()
        whole_s, planner_s = time.thread_time() - planned_at, planned_at - start
        if plan is None or not has_evicted:
            has_evicted = plan is not None and any(len(owner.evict) for owner in plan.owners)
            continue
        costs.append((whole_s, max(times_s), sum(times_s), planner_s))
        if len(costs) == num_batches:
            shard_mb = sum(array_bytes(part) for part in parts) / 1e6
            plan_mb = array_bytes(plan) / 1e6
            break
    one, slowest, together, planning = (statistics.median(column) * 1e3 for column in zip(*costs, strict=True))
    return ShardCost(
        whole_ms=one,
        shard_ms=slowest,
        shards_ms=together,
        planner_ms=planning,
        shard_mb=shard_mb,
        plan_mb=plan_mb,
        shard_state_mb=max(array_bytes(shard) for shard in shards) / 1e6,
    )


def _indexed(
    shards: Sequence[ShardIndexer], features: Sequence[list[int]], batch: Batch
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
