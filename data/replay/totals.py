"""`PlanTotals`: what the plans of a whole log add up to. Holds a few numbers per table, whatever the log's length.

CachePlan ──fetch, evict──> misses by table, resident rows and their peak
          └─exchanges────> rows sent between ranks, and bytes of those that a step waits for
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import CachePlan
from data.replay.exchange import ExchangeCounts, rows_now

__all__ = ["PlanTotals"]


class PlanTotals:
    """Add plans in order, read the attributes at any time.

    Args:
        weight_bytes, gradient_bytes: int64 by table, bytes of a row and of its gradient as they travel between ranks.

    Attributes:
        rows_unique: unique rows, summed over batches.
        misses: int64 by table: rows that entered a cache. Every one of them leaves it again, or is there at the end:
            it is written back either way.
        peak_rows: rows in the caches of all ranks at most.
        exchange_rows: rows and row gradients sent between ranks. exchange_rows_now: those that a step waits for;
            exchange_bytes_now: their bytes.
    """

    def __init__(self, weight_bytes: NDArray[np.int64], gradient_bytes: NDArray[np.int64]) -> None:
        self._weight_bytes = weight_bytes
        self._gradient_bytes = gradient_bytes
        self._resident = 0
        self.rows_unique = 0
        self.misses = np.zeros_like(weight_bytes)
        self.peak_rows = 0
        self.exchange_rows = 0
        self.exchange_rows_now = 0
        self.exchange_bytes_now = 0

    def add(self, plan: CachePlan) -> None:
        """The next plan."""
        for owner in plan.owners:
            self.misses += np.diff(owner.fetch.table_offsets)
            self._resident += len(owner.fetch) - len(owner.evict)
        self.peak_rows = max(self.peak_rows, self._resident)
        if not plan.exchanges:
            self.rows_unique += len(plan.consumers[0].unique)
            return
        self.rows_unique += sum(len(exchange.owned) for exchange in plan.exchanges)
        rows, gradients = rows_now(plan)
        self.exchange_rows += ExchangeCounts.of(plan).rows
        self.exchange_rows_now += int(rows.sum() + gradients.sum())
        self.exchange_bytes_now += int(rows @ self._weight_bytes + gradients @ self._gradient_bytes)
