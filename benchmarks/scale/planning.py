"""Cost of a plan at one point: processor time, memory of the planner, rows fetched, bytes of the plan.

    zipf ──ids──> Batch ──push──> Planner ──plan──> CachePlan      timed: push and plan, by the clock of the thread
                             └─> bytes of all arrays it holds

Measured once the caches are full and evicted rows return. Beside every plan one `np.sort` of the batch's ids shows the
machine's speed at that moment for arrays of that size.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import Planner
from bagpipe.types.batch import Batch
from benchmarks.scale.points import Point
from data.hashing import mix64
from data.zipf import ZipfLaw

__all__ = ["ROW_BYTES", "PlanCost", "array_bytes", "measure_planning"]

EXPONENT = 1.2
ROW_BYTES = 48 * 4
#: Before measuring, this many times the caches' rows have entered, and the caches have evicted for this many windows:
#: an evicted row returns after its window at the earliest, so fetches are not steady before.
WARM_UP = 2
#: A prime larger than any table: multiplying by it modulo a table's rows spreads popular ids over the table.
_PRIME = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCost:
    """Medians per batch, or means for rows.

    Attributes:
        plan_ms: of the thread's processor time, for one `push` and one `plan`.
        spread_ms: middle half of `plan_ms`.
        sort_ms: `np.sort` of the batch's ids.
        unique_rows, entered_rows: of a batch; those that were in no cache.
        fetched_mb: bytes of the rows that entered and had been seen before, by the planner's own record.
        plan_mb: bytes of one plan's arrays.
        planner_mb: bytes of all arrays the planner holds at the end, the window included.
    """

    plan_ms: float
    spread_ms: float
    sort_ms: float
    unique_rows: float
    entered_rows: float
    fetched_mb: float
    plan_mb: float
    planner_mb: float


def batches(point: Point) -> Iterator[Batch]:
    """An endless stream of fresh batches."""
    rng = np.random.default_rng(0)
    rows = point.vocabulary // point.tables
    law = ZipfLaw(vocabulary=rows, exponent=EXPONENT)
    spread = np.int64(_PRIME) if rows % _PRIME else np.int64(1)
    dense, labels = np.zeros((point.batch_size, 0), np.float32), np.zeros(point.batch_size, np.float32)
    lengths = np.ones((point.tables, point.batch_size), np.int32)
    index = 0
    while True:
        ranks = law.ranks(rng.random(point.ids))
        values = (ranks * spread) % rows if point.bounded else mix64(ranks.view(np.uint64)).view(np.int64)
        yield Batch(index=index, dense=dense, values=values, lengths=lengths, labels=labels)
        index += 1


def measure_planning(point: Point, num_batches: int) -> PlanCost:
    """Plan until the caches are in steady state, then measure `num_batches`."""
    planner = Planner(
        OracleSpec(
            table_rows=((point.vocabulary // point.tables) if point.bounded else None,) * point.tables,
            features=tuple(FeatureRef(feature=table, table=table) for table in range(point.tables)),
            num_slots=point.cache_rows // point.ranks,
            lookahead=point.lookahead,
            world_size=point.ranks,
        )
    )
    plan_s: list[float] = []
    sort_s: list[float] = []
    unique, entered, fetched, entered_before, batches_since = 0, 0, 0, 0, 0
    plan = None
    for batch in batches(point):
        start = time.thread_time()
        np.sort(batch.values)
        sorted_at = time.thread_time()
        planner.push(batch)
        plan = planner.plan() if planner.is_ready else None
        end = time.thread_time()
        if plan is None:
            continue
        if entered_before < WARM_UP * point.cache_rows or batches_since < WARM_UP * point.lookahead:
            entered_before += sum(len(owner.fetch) for owner in plan.owners)
            batches_since += any(len(owner.evict) for owner in plan.owners)
            continue
        plan_s.append(end - sorted_at)
        sort_s.append(sorted_at - start)
        unique += sum(len(exchange.owned) for exchange in plan.exchanges) or len(plan.consumers[0].unique)
        entered += sum(len(owner.fetch) for owner in plan.owners)
        fetched += sum(int(np.count_nonzero(~owner.fetch_new)) for owner in plan.owners)
        if len(plan_s) == num_batches:
            break
    low, median, high = (float(np.quantile(plan_s, q)) for q in (0.25, 0.5, 0.75))
    return PlanCost(
        plan_ms=median * 1e3,
        spread_ms=(high - low) * 1e3,
        sort_ms=statistics.median(sort_s) * 1e3,
        unique_rows=unique / num_batches,
        entered_rows=entered / num_batches,
        fetched_mb=fetched / num_batches * ROW_BYTES / 1e6,
        plan_mb=sum(array.nbytes for array in _arrays(plan)) / 1e6,
        planner_mb=array_bytes(planner) / 1e6,
    )


def array_bytes(root: object) -> int:
    """Bytes of all numpy buffers reachable from an object; a buffer counts once, however many views it has."""
    buffers = {}
    for array in _arrays(root):
        while isinstance(array.base, np.ndarray):
            array = array.base
        buffers[id(array)] = array.nbytes
    return sum(buffers.values())


_NOT_STATE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def _arrays(root: object) -> Iterator[NDArray[np.generic]]:
    seen, todo = {id(root)}, [root]
    while todo:
        item = todo.pop()
        if isinstance(item, np.ndarray):
            yield item
            continue
        for child in gc.get_referents(item):
            if id(child) not in seen and not isinstance(child, _NOT_STATE):
                seen.add(id(child))
                todo.append(child)
