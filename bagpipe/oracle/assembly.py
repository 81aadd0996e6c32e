"""Assembles the `CachePlan` of a batch: distributes the records of the unique rows to consumers and owners.

rank_index.rows (a rank's unique rows) ──gather──> its ConsumerPlan, pull_now
owner of each row ──stable sort──> owned rows of each rank
(owner, consumer) of each use ──stable sort──> serve lists: by owner, then consumer, then row
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.batch_indexer import IndexedBatch
from bagpipe.oracle.plan import CachePlan, ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.rank_index import RankIndex

__all__ = [
    "Decision",
    "GlobalRows",
    "SlottedRows",
    "assemble",
    "located",
    "places_among",
    "positions_by_rank",
    "select_rows",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GlobalRows:
    """The U unique rows of a global batch. `pull_now` and `owned` are unused for a single rank.

    Attributes:
        owners: uint16 ``[U]``.
        slots: int32 ``[U]``, in the owner's cache.
        push_now: bool ``[U]``, the next batch uses the row.
        pull_now: bool ``[U]``, the previous batch used the row.
        owned: int64 by rank, ascending positions of the rows it owns.
    """

    owners: NDArray[np.uint16]
    slots: NDArray[np.int32]
    push_now: NDArray[np.bool_]
    pull_now: NDArray[np.bool_]
    owned: tuple[NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlottedRows:
    """The U unique rows of a global batch of several ranks, in their slots, which the ranks number together.

    Attributes:
        slots: int64 ``[U]``, owner * slots of a rank + slot.
        missing: int64, positions of the rows that were in no slot.
        before: int64, slots of the previous batch's rows.
        marks: bool by slot, all False; scratch space.
        push_now: see `GlobalRows`.
        spec: of the planner.
    """

    slots: NDArray[np.int64]
    missing: NDArray[np.int64]
    before: NDArray[np.int64]
    marks: NDArray[np.bool_]
    push_now: NDArray[np.bool_]
    spec: OracleSpec

    def described(self) -> GlobalRows:
        """The records of the rows. One thread at a time: it uses `marks`."""
        self.marks[self.before] = True
        pull_now = self.marks.take(self.slots)
        self.marks[self.before] = False
        pull_now[self.missing] = False  # their slots held other rows
        owners, local = located(self.slots, self.spec)
        return GlobalRows(
            owners=owners,
            slots=local.astype(np.int32),
            push_now=self.push_now,
            pull_now=pull_now,
            owned=positions_by_rank(owners, self.spec.world_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """A planner's decisions for a batch. The planner changes none of them later, so another thread can make the plan.

    Attributes:
        indexed: the batch.
        rows: of the batch.
        owners: by rank.
    """

    indexed: IndexedBatch
    rows: GlobalRows | SlottedRows
    owners: tuple[OwnerPlan, ...]

    def plan(self) -> CachePlan:
        """The plan of the batch, see `assemble`. One thread at a time, of all decisions of a planner."""
        rows = self.rows.described() if isinstance(self.rows, SlottedRows) else self.rows
        return assemble(self.indexed, rows, self.owners)


def select_rows(rows: RowList, positions: NDArray[np.integer]) -> RowList:
    """The rows at these ascending positions."""
    return RowList(
        table_offsets=np.searchsorted(positions, rows.table_offsets).astype(np.int64), ids=rows.ids.take(positions)
    )


def places_among(rows: RowList, others: RowList) -> NDArray[np.int64]:
    """int64 ``[len(rows)]``: place of each row among `others`, of the same tables; -1 if it is not there.

    Inside a table the ids of both ascend as unsigned numbers, as those of `bagpipe.oracle.index.BatchIndex.unique` do.
    """
    found = np.full(len(rows), -1, dtype=np.int64)
    for table, (first, stop) in enumerate(itertools.pairwise(rows.table_offsets.tolist())):
        start, end = others.table_offsets[table : table + 2].tolist()
        if first < stop and start < end:
            places = np.searchsorted(others.ids[start:end].view(np.uint64), rows.ids[first:stop].view(np.uint64))
            places = np.minimum(places, end - start - 1) + start
            found[first:stop] = np.where(others.ids.take(places) == rows.ids[first:stop], places, -1)
    return found


def located(slots: NDArray[np.int64], spec: OracleSpec) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    """The rank of each slot, uint16, and its number within the rank, int64.

    Args:
        slots: int64, numbered ``owner * slots_per_rank + slot``.
        spec: of the planner.
    """
    owners = (slots // spec.slots_per_rank).astype(np.uint16)
    return owners, slots - owners * np.int64(spec.slots_per_rank)


def positions_by_rank(ranks: NDArray[np.unsignedinteger], world_size: int) -> tuple[NDArray[np.int64], ...]:
    """By rank, int64: the ascending positions of that rank in `ranks`."""
    keys = ranks.astype(np.uint8) if world_size <= 1 << 8 else ranks
    # A stable sort of 8 or 16 bits is a radix sort.
    order = np.argsort(keys, kind="stable")
    ends = np.cumsum(np.bincount(ranks, minlength=world_size)).tolist()
    return tuple(order[start:stop] for start, stop in itertools.pairwise([0, *ends]))


def assemble(batch: IndexedBatch, rows: GlobalRows, owners: tuple[OwnerPlan, ...]) -> CachePlan:
    """The plan of a batch; `owners` by rank."""
    if batch.whole is not None:
        sole = ConsumerPlan(
            unique=batch.unique,
            offsets=batch.whole.offsets,
            order=batch.whole.order,
            slots=rows.slots,
            owners=rows.owners,
            push_now=rows.push_now,
        )
        return CachePlan(batch_index=batch.batch_index, consumers=(sole,), owners=owners)
    return CachePlan(
        batch_index=batch.batch_index,
        consumers=tuple(_consumer(rank_index, batch.unique, rows) for rank_index in batch.rank_indexes),
        owners=owners,
        exchanges=_exchanges(
            batch.unique, rows, batch.rank_indexes, ready_after=max(owner.evict_after for owner in owners)
        ),
        examples=tuple(rank_index.examples for rank_index in batch.rank_indexes),
    )


def _consumer(rank_index: RankIndex, unique: RowList, rows: GlobalRows) -> ConsumerPlan:
    used = rank_index.rows.astype(np.int64)  # numpy gathers by int64; it converts other indices each time
    return ConsumerPlan(
        unique=select_rows(unique, used),
        offsets=rank_index.offsets,
        order=rank_index.order,
        slots=rows.slots.take(used),
        owners=rows.owners.take(used),
        push_now=rows.push_now.take(used),
    )


def _exchanges(
    unique: RowList, rows: GlobalRows, rank_indexes: Sequence[RankIndex], *, ready_after: int
) -> tuple[ExchangePlan, ...]:
    world_size = len(rank_indexes)
    place_among_owned = np.empty(len(unique), dtype=np.int32)
    for owned in rows.owned:
        place_among_owned[owned] = np.arange(owned.shape[0], dtype=np.int32)
    # Uses are ordered by consumer and keep that order within each owner.
    used = np.concatenate([rank_index.rows for rank_index in rank_indexes]).astype(np.int64)
    owners = rows.owners.take(used)
    served = tuple(place_among_owned.take(used.take(uses)) for uses in positions_by_rank(owners, world_size))
    counts = np.zeros((world_size, world_size + 1), dtype=np.int64)  # by owner, consumer + 1
    start = 0
    for consumer, rank_index in enumerate(rank_indexes):
        counts[:, consumer + 1] = np.bincount(owners[start : start + rank_index.rows.shape[0]], minlength=world_size)
        start += rank_index.rows.shape[0]
    serve_offsets = np.cumsum(counts, axis=1).astype(np.int32)
    return tuple(
        ExchangePlan(
            pull_now=rows.pull_now.take(rank_index.rows),
            owned=select_rows(unique, owned),
            owned_slots=rows.slots.take(owned),
            owned_pull_now=rows.pull_now.take(owned),
            owned_push_now=rows.push_now.take(owned),
            serve_offsets=offsets,
            serve_rows=serve_rows,
            ready_after=ready_after,
        )
        for rank_index, owned, offsets, serve_rows in zip(rank_indexes, rows.owned, serve_offsets, served, strict=True)
    )
