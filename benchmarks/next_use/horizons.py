"""Planning with `oracle.horizon = log` against the window: two planners plan the same batches in turn.

batches ──rows, to a file──> backwards: the next batch with each row ──> batches that tell their next uses
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.oracle.planner import make_planner
from bagpipe.types.batch import NO_USE, Batch
from benchmarks.planner.main import batches
from data.criteo_skew import CRITEO_KAGGLE_ROWS

__all__ = ["measure_horizons"]

HORIZONS = ("window", "log")


def measure_horizons(*, batch_size: int, lookahead: int, cache_rows: int, count: int) -> dict[str, float]:
    """Processor milliseconds of a plan by horizon, medians over the batches at which both evict; and of their ratio.

    Args:
        batch_size: examples of a batch, of the table sizes of Criteo Kaggle.
        lookahead: batches of the window.
        cache_rows: of one rank.
        count: batches of the log.
    """
    num_tables = len(CRITEO_KAGGLE_ROWS)
    spec = OracleSpec(
        table_rows=CRITEO_KAGGLE_ROWS,
        features=tuple(FeatureRef(feature=table, table=table) for table in range(num_tables)),
        num_slots=cache_rows,
        lookahead=lookahead,
    )
    plan_s: dict[str, list[float]] = {horizon: [] for horizon in HORIZONS}
    planners = {horizon: make_planner(dataclasses.replace(spec, horizon=horizon)) for horizon in HORIZONS}
    with tempfile.TemporaryDirectory() as folder:
        next_uses = _next_uses(batches(batch_size, count, scramble=False), count, Path(folder) / "next-uses")
        for batch, next_use in zip(batches(batch_size, count, scramble=False), next_uses, strict=True):
            told = dataclasses.replace(batch, next_use=np.array(next_use))
            taken_s = {}
            for horizon in HORIZONS if batch.index % 2 else HORIZONS[::-1]:
                start_s = time.thread_time()
                planners[horizon].push(told)
                plan = planners[horizon].plan() if planners[horizon].is_ready else None
                if plan is not None and any(len(owner.evict) for owner in plan.owners):
                    taken_s[horizon] = time.thread_time() - start_s
                del plan
            if len(taken_s) == len(HORIZONS):
                for horizon, each_s in taken_s.items():
                    plan_s[horizon].append(each_s)
    window_ms, log_ms = (statistics.median(plan_s[horizon]) * 1e3 for horizon in HORIZONS)
    ratios = [log_s / window_s for window_s, log_s in zip(plan_s["window"], plan_s["log"], strict=True)]
    return {
        "compared": len(ratios),
        "window_ms": window_ms,
        "log_ms": log_ms,
        "ratio": statistics.median(ratios),
    }


def _next_uses(log: Iterator[Batch], count: int, path: Path) -> NDArray[np.int32]:
    """int32 ``[count, ids]``, in a file: the next batch with the row of each id."""
    found: NDArray[np.int32] | None = None
    for number, batch in enumerate(log):
        if found is None:
            found = np.lib.format.open_memmap(path, "w+", np.int32, (count, batch.values.shape[0]))
        first_rows = np.cumsum([0, *CRITEO_KAGGLE_ROWS[:-1]])
        found[number] = batch.values + first_rows.repeat(batch.num_examples)
    assert found is not None, "there are batches"
    upcoming = np.full(sum(CRITEO_KAGGLE_ROWS), NO_USE, dtype=np.int32)
    for number in range(count - 1, -1, -1):
        rows = np.array(found[number])
        found[number] = upcoming[rows]
        upcoming[rows] = number
    return found
