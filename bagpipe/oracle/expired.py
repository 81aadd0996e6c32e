"""Expired rows in plans: which rank deletes each of them, and from which slot.

A row in a cache is deleted by its owner, any other one by a rank that its hash chooses. Deletions are spread over the
ranks, and one rank deletes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import positions_by_rank, select_rows
from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.handles import DenseHandles, HashHandles, hash_rows
from bagpipe.oracle.plan import NO_BATCH, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.resident_set import SlotState

__all__ = ["ExpiredOfRank", "empty_slots", "split_expired", "with_expired"]


@dataclass(frozen=True, slots=True, eq=False)
class ExpiredOfRank:
    """Rows that a rank deletes. `slots`: int32 ``[len(rows)]``, -1 for a row that is in no cache."""

    rows: RowList
    slots: NDArray[np.int32]


def empty_slots(
    expired: RowList, handles: DenseHandles | HashHandles, slot_of_handle: NDArray[np.int32], state: SlotState
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Empty the slots of expired rows in a planner's state.

    Args:
        expired: rows.
        handles: of the planner.
        slot_of_handle: int32 by handle, -1 for a row in no cache.
        state: of all slots.

    Returns:
        int64 ``[len(expired)]``: the slots, -1 for a row in no cache. And int64: handles of the rows that had slots and
        that the window does not use, which are needed no more.
    """
    of_rows = handles.find(expired)
    slots = np.full(of_rows.shape[0], -1, dtype=np.int64)
    known = np.flatnonzero(of_rows >= 0)
    slots[known] = slot_of_handle.take(of_rows.take(known))
    resident = np.flatnonzero(slots >= 0)
    emptied, gone = slots.take(resident), of_rows.take(resident)
    is_idle = state.next_use.take(emptied) == NEVER
    state.handle[emptied] = -1
    slot_of_handle[gone] = -1
    return slots, gone[is_idle]


def split_expired(expired: RowList, slots: NDArray[np.int64], spec: OracleSpec) -> tuple[ExpiredOfRank, ...]:
    """The expired rows of each rank, in rank order.

    Args:
        expired: rows in the order of `BatchIndex.unique`.
        slots: int64 ``[len(expired)]``, numbered ``owner * slots_per_rank + slot``; -1 for a row in no cache.
        spec: of the planner.
    """
    if spec.world_size == 1:
        return (ExpiredOfRank(expired, slots.astype(np.int32)),)
    each = max(spec.slots_per_rank, 1)
    is_resident = slots >= 0
    ranks = np.where(is_resident, slots // each, (hash_rows(expired) % np.uint64(spec.world_size)).astype(np.int64))
    local = np.where(is_resident, slots % each, -1).astype(np.int32)
    return tuple(
        ExpiredOfRank(select_rows(expired, positions), local.take(positions))
        for positions in positions_by_rank(ranks.astype(np.uint16), spec.world_size)
    )


def with_expired(
    owners: Sequence[OwnerPlan], expired: Sequence[ExpiredOfRank], batch_index: int
) -> tuple[OwnerPlan, ...]:
    """The records of the ranks with the rows that they delete before a batch.

    Evictions of the batch then wait for the update of the batch before: so each rank deletes the rows in the interval
    between checkpoints in which that batch lies, after all writes of them.
    """
    latest = max(batch_index - 1, NO_BATCH)
    return tuple(
        dataclasses.replace(owner, expired=rows.rows, expired_slots=rows.slots, evict_after=latest)
        for owner, rows in zip(owners, expired, strict=True)
    )
