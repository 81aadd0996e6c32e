"""`CachePlan`: everything that the engine needs to know about one batch's rows. Pure data.

    occurrence p ──inverse[p]──> unique row u ──slots[u]──> slot in the owner's cache
    unique row u ──order[offsets[u]:offsets[u+1]]──> its occurrences (the transpose, in CSR form)

*Occurrences* are numbered in memory order after the batch's features are put in the order of `OracleSpec.features`
(table by table): segment after segment, one segment per feature and table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NO_BATCH",
    "SPARE_PART",
    "CachePlan",
    "ConsumerPlan",
    "ExchangePlan",
    "FeatureRef",
    "OracleSpec",
    "OwnerPlan",
    "RowList",
    "by_occurrence",
    "cache_rows_in",
    "slots_of",
    "spare_slots",
]

_Number = TypeVar("_Number", np.int32, np.int64)

#: "No batch": a batch index smaller than every real one.
NO_BATCH = -1
#: A sixth of the cache. In benchmarks/overlap, with caches of 2.0 batches, 13 % of it leaves right after a use.
SPARE_PART = 6
#: Choices of `OracleSpec.horizon`.
HORIZONS = ("window", "log")


def spare_slots(cache_rows: int) -> int:
    """Slots of a rank beside those of its cache rows, for rows that leave but still wait for their update."""
    return cache_rows // SPARE_PART


def slots_of(cache_rows: int) -> int:
    """All slots of a rank's cache, spare ones included."""
    return cache_rows + spare_slots(cache_rows)


def cache_rows_in(num_slots: int) -> int:
    """The most cache rows of a rank whose slots, spare ones included, are at most `num_slots`."""
    return num_slots - (num_slots + 1) // (SPARE_PART + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRef:
    """One segment of occurrences: feature number `feature` of the batch, looked up in table number `table`."""

    feature: int
    table: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleSpec:
    """The input of the planner besides the batches.

    Attributes:
        table_rows: per table number: ids lie in ``[0, rows)``, or None for any 64-bit id.
        features: occurrence segments, sorted by table number. A feature can appear under several tables.
        num_slots: cache rows per rank; 0 is direct mode (no cache). Rows that leave are in `spare_slots` beside them.
        grows: the planner begins with fewer cache rows and adds those that the window needs, up to `num_slots`.
        lookahead: batches in the window, the one being planned included; at least 1.
        policy: name of an eviction policy.
        world_size: number of ranks.
        assign: assignment of examples to ranks: contiguous, locality or own.
        example_shares: by rank, its proportion of every batch's examples (0: none); empty: equal. See
            `bagpipe.oracle.assign.share_bounds`.
        rows_delay: batches between the lookup of a batch and the latest update that it sees, 0 or 1. A row stays in its
            slot from a lookup until the update that follows, so with 1 the rows of two batches are held at a time.
        horizon: what orders rows without a use in the window: window: their past uses; log: their next use in the
            whole log, which the batches tell (`Batch.next_use`).
    """

    table_rows: tuple[int | None, ...]
    features: tuple[FeatureRef, ...]
    num_slots: int
    lookahead: int
    grows: bool = False
    policy: str = "belady-window"
    world_size: int = 1
    assign: str = "contiguous"
    example_shares: tuple[int, ...] = ()
    rows_delay: int = 0
    horizon: str = "window"

    @property
    def slots_per_rank(self) -> int:
        """All slots of a rank's cache, spare ones included."""
        return slots_of(self.num_slots)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowList:
    """Rows of several tables, grouped by table number.

    Attributes:
        table_offsets: int64 ``[num_tables + 1]``; rows of table t are ``ids[table_offsets[t]:table_offsets[t+1]]``.
        ids: int64 ``[num_rows]``.
    """

    table_offsets: NDArray[np.int64]
    ids: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.ids.shape[0])


def by_occurrence(of_rows: NDArray[_Number], offsets: NDArray[np.int32], order: NDArray[np.int32]) -> NDArray[_Number]:
    """A value for each occurrence, from one for each unique row: the transpose of a CSR form.

    Args:
        of_rows: ``[U]``; with the positions 0 up to U the result is the inverse, the row of each occurrence.
        offsets: int32 ``[U + 1]``, CSR row pointers.
        order: int32 ``[num_occurrences]``, occurrence numbers grouped by unique row.
    """
    values = np.empty(order.shape[0], dtype=of_rows.dtype)
    values[order] = of_rows.repeat(np.diff(offsets))
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConsumerPlan:
    """The rows that one rank reads for its examples.

    Attributes:
        unique: the distinct rows, grouped by table; U of them.
        offsets: int32 ``[U + 1]``, CSR row pointers.
        order: int32 ``[num_occurrences]``, occurrence numbers grouped by unique row, ascending within a row.
        slots: int32 ``[U]``, slot of each unique row in its owner's cache.
        owners: uint16 ``[U]``, rank whose cache holds the row.
        push_now: bool ``[U]``, the next batch (of any rank) uses the row, so its update must land first.
    """

    unique: RowList
    offsets: NDArray[np.int32]
    order: NDArray[np.int32]
    slots: NDArray[np.int32]
    owners: NDArray[np.uint16]
    push_now: NDArray[np.bool_]

    @property
    def inverse(self) -> NDArray[np.int32]:
        """int32 ``[num_occurrences]``, see `by_occurrence`. Made anew by each call."""
        return by_occurrence(np.arange(len(self.unique), dtype=np.int32), self.offsets, self.order)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnerPlan:
    """Changes of one rank's cache before it can serve the batch.

    Attributes:
        fetch: rows that enter the cache for this batch.
        fetch_slots: int32 ``[len(fetch)]``, their slots.
        fetch_new: bool ``[len(fetch)]``, the first plan of this row. In a namespace that was empty when the job began
            the row cannot be in the store, so it is not read.
        evict: rows that leave the cache before the fetched ones are inserted.
        evict_slots: int32 ``[len(evict)]``, their slots.
        evict_after: the batch whose row update must be done before the evicted rows are read out of their slots:
            no earlier than the last use of any of them; `NO_BATCH` if none.
        evict_waiting: how many evicted rows were used by the previous batch (with `OracleSpec.rows_delay` 1, the one
            before it). The eviction waits for that batch's update, and the next forward for the eviction.
        fetch_after: the batch whose evicted rows must be acknowledged by the store before the fetch may be sent:
            no earlier than the latest eviction of any fetched row; `NO_BATCH` if none.
        num_slots: most slots in use up to and including this batch (direct mode has no fixed number).
        expired: rows that are deleted before the batch, from the store and from this rank's cache; each expired row is
            in the record of one rank. None: no rank deletes any before this batch. If rows expire in a job, the store
            has no row of `fetch_new`.
        expired_slots: int32 ``[len(expired)]``, their slots, -1 for a row that is in no cache. They are not read out.
            Evictions wait for the update of the batch before. None as `expired`.
    """

    fetch: RowList
    fetch_slots: NDArray[np.int32]
    fetch_new: NDArray[np.bool_]
    evict: RowList
    evict_slots: NDArray[np.int32]
    evict_after: int
    evict_waiting: int
    fetch_after: int
    num_slots: int
    expired: RowList | None = None
    expired_slots: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangePlan:
    """One rank's exchange with the other ranks: rows before the forward, row gradients after the backward.

    A rank *consumes* the U unique rows of its `ConsumerPlan` and *owns* M rows of the batch, used by any rank. Rank
    ``c.owners[u]`` serves row u of consumer c. Both sides list the rows they share in the order of the consumer's
    unique rows, so counts and order do not travel.

    Attributes:
        pull_now: bool ``[U]``, the previous batch (of any rank) used the row, so the pull waits for its update.
        owned: rows of the batch that this rank owns, grouped by table; M of them.
        owned_slots: int32 ``[M]``, slot of each in this rank's cache.
        owned_pull_now: bool ``[M]``, as `pull_now`.
        owned_push_now: bool ``[M]``, as `ConsumerPlan.push_now`.
        serve_offsets: int32 ``[world_size + 1]``; rows served to rank c are
            ``serve_rows[serve_offsets[c]:serve_offsets[c + 1]]``. A rank serves itself too.
        serve_rows: int32 ``[S]``, positions among `owned`, ascending for each consumer.
        ready_after: the latest `OwnerPlan.evict_after` of all ranks. Before that update some rank's rows of the batch
            cannot be in its cache, and no rank begins an exchange that would wait for it.
    """

    pull_now: NDArray[np.bool_]
    owned: RowList
    owned_slots: NDArray[np.int32]
    owned_pull_now: NDArray[np.bool_]
    owned_push_now: NDArray[np.bool_]
    serve_offsets: NDArray[np.int32]
    serve_rows: NDArray[np.int32]
    ready_after: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachePlan:
    """The plan of one batch: one consumer and one owner record per rank.

    Attributes:
        batch_index: the batch.
        consumers, owners: by rank.
        exchanges: by rank; empty for a single rank.
        examples: by rank, int32 numbers of the examples it gets, ascending; empty for a single rank, which gets all.
    """

    batch_index: int
    consumers: tuple[ConsumerPlan, ...]
    owners: tuple[OwnerPlan, ...]
    exchanges: tuple[ExchangePlan, ...] = ()
    examples: tuple[NDArray[np.int32], ...] = ()
