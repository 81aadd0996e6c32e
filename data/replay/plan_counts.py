"""Counts from plans, without training: rows exchanged between ranks per batch, and the totals of a whole log.

CachePlan ──exchanges, consumers──> ExchangeCounts: pulls and pushes between owners and consumers
          ├───────────────────────> exchanged_now: by table, those on a step's critical path
          └─fetch, evict──────────> PlanTotals: a few numbers per table, independent of the log's length
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.plan import CachePlan, RowList

__all__ = ["ExchangeCounts", "PlanTotals", "exchanged_now"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCounts:
    """Rows of one batch exchanged between ranks, with an owner per row.

    Attributes:
        pull_now, pull_early: rows sent by owners to other ranks: after the previous batch's update, or during it.
        push_now, push_late: row gradients sent to owners on other ranks: before the next batch, or during it.
        busiest_now, busiest: rows sent by the busiest sender: those on a step's critical path, and all.
        used: unique rows of each rank, summed: the volume if no rank owned a row that it uses.
        fetched, written: rows read from the store and written back. busiest_fetched: by the rank that reads most.
    """

    pull_now: float
    pull_early: float
    push_now: float
    push_late: float
    busiest_now: float
    busiest: float
    used: float
    fetched: float
    written: float
    busiest_fetched: float

    @classmethod
    def of(cls, plan: CachePlan) -> Self:
        """Count one plan."""
        num_ranks = len(plan.consumers)
        pulls, pushes = np.zeros((2, num_ranks)), np.zeros((2, num_ranks))  # [now], [early or late]; by sender
        for rank, exchange in enumerate(plan.exchanges):
            sent = _sent(plan, rank)
            now = int(exchange.owned_pull_now[sent].sum())
            pulls[:, rank] = now, len(sent) - now
        for rank, consumer in enumerate(plan.consumers):
            is_remote = consumer.owners != rank
            now = int(consumer.push_now[is_remote].sum())
            pushes[:, rank] = now, int(is_remote.sum()) - now
        fetched = [len(owner.fetch) for owner in plan.owners]
        return cls(
            pull_now=pulls[0].sum(),
            pull_early=pulls[1].sum(),
            push_now=pushes[0].sum(),
            push_late=pushes[1].sum(),
            busiest_now=(pulls[0] + pushes[0]).max(),
            busiest=(pulls + pushes).sum(axis=0).max(),
            used=sum(len(consumer.unique) for consumer in plan.consumers),
            fetched=sum(fetched),
            written=sum(len(owner.evict) for owner in plan.owners),
            busiest_fetched=max(fetched),
        )

    @property
    def rows(self) -> int:
        """Rows and row gradients sent."""
        return int(self.pull_now + self.pull_early + self.push_now + self.push_late)


class PlanTotals:
    """Totals over the plans of a log. Add plans in order; attributes can be read at any time.

    Args:
        weight_bytes, gradient_bytes: int64 by table, bytes of a row and of its gradient as sent between ranks.

    Attributes:
        rows_unique: unique rows, summed over batches.
        misses: int64 by table: rows that entered a cache. Each is written back, at eviction or at the end, unless it
            expires there. dropped: int64 by table: rows that do.
        evictions_waiting: rows of `OwnerPlan.evict_waiting`. batches_waiting: batches with any.
        peak_rows: most rows in the caches of all ranks.
        exchange_rows: rows and row gradients sent between ranks. exchange_rows_now: those on a step's critical path;
            exchange_bytes_now: their bytes.
    """

    def __init__(self, weight_bytes: NDArray[np.int64], gradient_bytes: NDArray[np.int64]) -> None:
        self._weight_bytes = weight_bytes
        self._gradient_bytes = gradient_bytes
        self._resident = 0
        self.rows_unique = 0
        self.misses, self.dropped = np.zeros_like(weight_bytes), np.zeros_like(weight_bytes)
        self.evictions_waiting = self.batches_waiting = 0
        self.peak_rows = 0
        self.exchange_rows = 0
        self.exchange_rows_now = 0
        self.exchange_bytes_now = 0

    def add(self, plan: CachePlan) -> None:
        """Add the next plan."""
        for owner in plan.owners:
            self.misses += np.diff(owner.fetch.table_offsets)
            self._resident += len(owner.fetch) - len(owner.evict)
            if owner.expired is not None and owner.expired_slots is not None:
                dropped = _by_table(owner.expired, np.flatnonzero(owner.expired_slots >= 0))
                self.dropped += dropped
                self._resident -= int(dropped.sum())
        num_waiting = sum(owner.evict_waiting for owner in plan.owners)
        self.evictions_waiting += num_waiting
        self.batches_waiting += num_waiting > 0
        self.peak_rows = max(self.peak_rows, self._resident)
        if not plan.exchanges:
            self.rows_unique += len(plan.consumers[0].unique)
            return
        self.rows_unique += sum(len(exchange.owned) for exchange in plan.exchanges)
        rows, gradients = exchanged_now(plan)
        self.exchange_rows += ExchangeCounts.of(plan).rows
        self.exchange_rows_now += int(rows.sum() + gradients.sum())
        self.exchange_bytes_now += int(rows @ self._weight_bytes + gradients @ self._gradient_bytes)


def exchanged_now(plan: CachePlan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """int64 by table each: rows, and row gradients, sent on a step's critical path (`pull_now` and `push_now`)."""
    rows, gradients = np.zeros((2, plan.owners[0].fetch.table_offsets.shape[0] - 1), dtype=np.int64)
    for rank, (consumer, exchange) in enumerate(zip(plan.consumers, plan.exchanges, strict=False)):
        sent = _sent(plan, rank)
        rows += _by_table(exchange.owned, sent[exchange.owned_pull_now[sent]])
        gradients += _by_table(consumer.unique, np.flatnonzero((consumer.owners != rank) & consumer.push_now))
    return rows, gradients


def _sent(plan: CachePlan, rank: int) -> NDArray[np.int32]:
    """Rows that a rank sends to others, as positions among the rows it owns."""
    exchange = plan.exchanges[rank]
    own = slice(*exchange.serve_offsets[rank : rank + 2])
    return np.delete(exchange.serve_rows, np.r_[own])


def _by_table(rows: RowList, positions: NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 by table: number of positions in each table."""
    tables = np.searchsorted(rows.table_offsets, positions, side="right") - 1
    return np.bincount(tables, minlength=rows.table_offsets.shape[0] - 1).astype(np.int64)
