"""Which row leaves next: a bucket queue over slots, and the policies that rank them.

Every evictable slot has a *rank*; the highest rank leaves first. That of a row which the window uses again is its next
use; that of another follows from its worth. The queue keeps slots in buckets by rank, those of a bucket in the order in
which they came, and drops out-of-date entries only when it meets them:

    push(slots, ranks) ──> bucket[rank] = [chunk, chunk, …]      rank_of_slot[slot] = rank
    pop(k)             ──> highest bucket first; an entry counts only if rank_of_slot still says this rank

Both are O(entries) in numpy; Python loops run over distinct ranks of a batch, never over slots.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.worth import TICKS

__all__ = ["NEVER", "NEVER_RANK", "POLICIES", "EvictionQueue", "Policy", "idle_rank"]

#: Next use of a row that the window does not use again.
NEVER = np.iinfo(np.int32).max
#: Ranks at or above this belong to rows with no use in the window (batch indices stay below it).
NEVER_RANK = 1 << 30
_OLDEST_RANK = (1 << 31) - 1
_NOT_QUEUED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An eviction policy. Rows that the window uses again always leave last, farthest next use first (Belady 1966).

    Attributes:
        drop_idle: rows that it does not use again leave at once, room or not; else when room is needed, the row worth
            least first (`idle_rank`).
    """

    drop_idle: bool = False


POLICIES: Mapping[str, Policy] = {
    "belady-window": Policy(),
    "paper": Policy(drop_idle=True),
}

#: Ticks of worth that share a rank: a sixteenth of a half-life, less than 5 % of a row's weight.
_TICKS_OF_RANK = TICKS // 16


def idle_rank(worth: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32: ranks of rows that the window does not use again, at least `NEVER_RANK`, from what they are worth."""
    ranks: NDArray[np.int32] = np.int32(_OLDEST_RANK) - worth // np.int32(_TICKS_OF_RANK)
    return ranks


class EvictionQueue:
    """Slots by rank. Entries out of date are skipped when met, and swept when they outnumber the slots 4 to 1.

    Ranks of rows that the window uses are batch indices, so those up to the batch being planned are over: such slots
    count as not queued, and nobody has to take a slot out when its row is used.
    """

    def __init__(self, num_slots: int) -> None:
        self._rank_of_slot = np.full(num_slots, _NOT_QUEUED, dtype=np.int32)
        self._stamp_of_slot = np.zeros(num_slots, dtype=np.int32)
        self._buckets: dict[int, list[NDArray[np.int64]]] = {}
        self._heap: list[int] = []
        self._num_entries = 0
        self._now = _NOT_QUEUED

    @property
    def num_entries(self) -> int:
        """Entries held, out-of-date ones included; at most 4 per slot plus one batch."""
        return self._num_entries

    def advance(self, batch_index: int) -> None:
        """This batch is planned now: ranks up to it are over."""
        self._now = batch_index

    def push(self, slots: NDArray[np.int64], ranks: NDArray[np.int32]) -> None:
        """Make slots evictable, or change their rank. Fastest if the ranks of a call lie close together."""
        self._rank_of_slot[slots] = ranks
        self._append(slots, ranks)
        if self._num_entries > 4 * self._rank_of_slot.shape[0] + slots.shape[0]:
            self._sweep()

    def is_queued(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        queued: NDArray[np.bool_] = self._rank_of_slot.take(slots) > self._now
        return queued

    def pop(self, count: int, min_rank: int = 0) -> NDArray[np.int64]:
        """Up to `count` slots of the highest ranks, none below `min_rank`; they are no longer queued."""
        min_rank = max(min_rank, self._now + 1)
        popped: list[NDArray[np.int64]] = []
        while count > 0 and self._heap and -self._heap[0] >= min_rank:
            slots, ranks = self._valid(*self._drop_buckets(count, min_rank))
            if slots.shape[0] > count:
                self._append(slots[count:], ranks[count:])
                slots = slots[:count]
            self._rank_of_slot[slots] = _NOT_QUEUED
            popped.append(slots)
            count -= slots.shape[0]
        return np.concatenate(popped) if popped else np.empty(0, dtype=np.int64)

    def pop_idle(self) -> NDArray[np.int64]:
        """All slots of rows that the window does not use again; they are no longer queued."""
        return self.pop(self._rank_of_slot.shape[0], min_rank=NEVER_RANK)

    def any_in_both(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> bool:
        """Some slot is in both."""
        self._stamp_of_slot[second] = 0
        self._stamp_of_slot[first] = 1
        return bool(self._stamp_of_slot.take(second).any())

    def _append(self, slots: NDArray[np.int64], ranks: NDArray[np.int32]) -> None:
        if not slots.shape[0]:
            return
        lowest = int(ranks.min())
        span = int(ranks.max()) - lowest
        # A 16-bit key lets numpy's stable sort be a radix sort; ranks of a batch span at most the window.
        keys = (ranks - lowest).astype(np.uint16) if span < 1 << 16 else ranks
        by_rank = np.argsort(keys, kind="stable")
        slots, ranks = slots.take(by_rank), ranks.take(by_rank)
        starts = [0, *(np.flatnonzero(ranks[1:] != ranks[:-1]) + 1).tolist()]
        for start, stop, rank in zip(starts, [*starts[1:], slots.shape[0]], ranks[starts].tolist(), strict=True):
            bucket = self._buckets.get(rank)
            if bucket is None:
                bucket = self._buckets[rank] = []
                heapq.heappush(self._heap, -rank)
            bucket.append(slots[start:stop])
        self._num_entries += slots.shape[0]

    def _drop_buckets(self, count: int, min_rank: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Take the highest buckets with at least `count` entries out of the queue: slots and ranks, highest first."""
        chunks: list[NDArray[np.int64]] = []
        ranks: list[int] = []
        sizes: list[int] = []
        while sum(sizes) < count and self._heap and -self._heap[0] >= min_rank:
            ranks.append(-heapq.heappop(self._heap))
            bucket = self._buckets.pop(ranks[-1])
            sizes.append(sum(chunk.shape[0] for chunk in bucket))
            chunks.extend(bucket)
        self._num_entries -= sum(sizes)
        return np.concatenate(chunks), np.repeat(np.array(ranks, dtype=np.int32), sizes)

    def _valid(self, slots: NDArray[np.int64], ranks: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Entries whose slot still has this rank, each slot once."""
        current = np.flatnonzero(self._rank_of_slot.take(slots) == ranks)
        slots, ranks = slots.take(current), ranks.take(current)
        stamps = np.arange(slots.shape[0], dtype=np.int32)
        self._stamp_of_slot[slots] = stamps
        once = self._stamp_of_slot.take(slots) == stamps
        return (slots, ranks) if once.all() else (slots[once], ranks[once])

    def _sweep(self) -> None:
        self._buckets.clear()
        self._heap.clear()
        self._num_entries = 0
        slots = np.flatnonzero(self._rank_of_slot > self._now)
        ranks = self._rank_of_slot[slots]
        idle = ranks >= NEVER_RANK
        for part in (idle, ~idle):
            self._append(slots[part], ranks[part])
