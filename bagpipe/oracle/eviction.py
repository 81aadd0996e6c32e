"""Eviction order: a bucket queue over slots, and the policies that rank them.

Every evictable slot has a *rank*; the highest rank is evicted first. The rank of a row with a next use in the window is
that batch index; the rank of an idle row (no use in the window) follows from its LRFU score. The queue keeps slots in
buckets by rank, in push order within a bucket, and drops stale entries when it meets them:

    push(slots, ranks) ──> bucket[rank] = [chunk, chunk, …]      push_of_slot[slot] = number of this push
    pop(k)             ──> highest bucket first; an entry is stale if its slot was pushed again since

Rows that were used once share a rank, so a bucket can hold much of the cache: a pop takes entries off its front and
leaves the others in place. Both operations are O(entries pushed or met) in numpy. Python loops run over the distinct
ranks of a batch and over chunks, never over slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.lrfu import TICKS

__all__ = ["NEVER", "NEVER_RANK", "POLICIES", "EvictionQueue", "Policy", "idle_rank"]

#: Next use of an idle row: no use in the window.
NEVER = np.iinfo(np.int32).max
#: Ranks at or above this belong to idle rows. Batch indices stay below it.
NEVER_RANK = 1 << 30
_OLDEST_RANK = (1 << 31) - 1
_NOT_QUEUED = -1
_NOT_PUSHED = 0
#: A pop takes at least this many entries of a chunk, so that few passes suffice when most entries are stale.
_MIN_TAKEN = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An eviction policy. Rows with a next use in the window leave last, farthest next use first (Belady 1966).

    Attributes:
        drop_idle: evict idle rows immediately, even while there is room; else only when room is needed, lowest score
            first (`idle_rank`).
    """

    drop_idle: bool = False


POLICIES: Mapping[str, Policy] = {
    "belady-window": Policy(),
    "drop-unused": Policy(drop_idle=True),
}

#: Score ticks that share a rank: a sixteenth of a half-life, less than 5 % of a row's weight.
_TICKS_OF_RANK = TICKS // 16


def idle_rank(scores: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32: ranks of idle rows with these LRFU scores, at least `NEVER_RANK`."""
    ranks: NDArray[np.int32] = np.int32(_OLDEST_RANK) - scores // np.int32(_TICKS_OF_RANK)
    return ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Entries of one rank from one push.

    Attributes:
        rank: of these entries.
        push: number of the push.
        slots: int64, distinct.
    """

    rank: int
    push: int
    slots: NDArray[np.int64]

    def cut(self, count: int) -> tuple[_Chunk, _Chunk]:
        """The first `count` entries, and the rest. The rest holds at most twice the memory that it needs.

        Repeated cuts copy fewer entries in total than the chunk had.
        """
        rest = self.slots[count:]
        whole = self.slots if self.slots.base is None else self.slots.base
        if 2 * rest.nbytes < whole.nbytes:
            rest = rest.copy()
        return _Chunk(self.rank, self.push, self.slots[:count]), _Chunk(self.rank, self.push, rest)


class EvictionQueue:
    """Slots by rank. Stale entries are skipped when met, and swept when entries outnumber slots 4 to 1.

    Ranks below `NEVER_RANK` are batch indices. Those up to the batch being planned have passed: their slots count as
    not queued, so using a row needs no removal.
    """

    def __init__(self, num_slots: int) -> None:
        self._rank_of_slot = np.full(num_slots, _NOT_QUEUED, dtype=np.int32)
        self._push_of_slot = np.full(num_slots, _NOT_PUSHED, dtype=np.int32)
        self._is_marked = np.zeros(num_slots, dtype=np.bool_)
        self._buckets: dict[int, deque[_Chunk]] = {}
        self._heap: list[int] = []
        self._num_entries = 0
        self._num_pushes = 0
        self._now = _NOT_QUEUED

    @property
    def num_entries(self) -> int:
        """Entries held, stale ones included: at most 4 per slot plus one batch."""
        return self._num_entries

    def advance(self, batch_index: int) -> None:
        """Planning reaches this batch: ranks up to it have passed."""
        self._now = batch_index

    def push(self, slots: NDArray[np.int64], ranks: NDArray[np.int32]) -> None:
        """Make distinct slots evictable, or change their ranks. Fastest if the ranks of a call lie close together."""
        if not slots.shape[0]:
            return
        self._num_pushes += 1
        self._rank_of_slot[slots] = ranks
        self._push_of_slot[slots] = self._num_pushes
        lowest = int(ranks.min())
        span = int(ranks.max()) - lowest
        # A 16-bit key lets numpy's stable sort be a radix sort; ranks of a batch span at most the window.
        keys = (ranks - lowest).astype(np.uint16) if span < 1 << 16 else ranks
        by_rank = np.argsort(keys, kind="stable")
        sorted_slots, ranks = slots.take(by_rank), ranks.take(by_rank)
        starts = [0, *(np.flatnonzero(ranks[1:] != ranks[:-1]) + 1).tolist()]
        for start, stop, rank in zip(starts, [*starts[1:], slots.shape[0]], ranks[starts].tolist(), strict=True):
            # A copy: a view would keep the whole push in memory for a few entries.
            self._bucket(rank).append(_Chunk(rank, self._num_pushes, sorted_slots[start:stop].copy()))
        self._num_entries += slots.shape[0]
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
            chunks = self._take(count, min_rank)
            slots, is_current = self._current(chunks)
            current = np.flatnonzero(is_current)
            if current.shape[0] > count:
                # Without the last chunk there are fewer entries than wanted, so the surplus is at its end.
                last = chunks[-1]
                num_met = int(current[count]) - (slots.shape[0] - last.slots.shape[0])
                self._put_back(last.cut(num_met)[1])
                current = current[:count]
            slots = slots.take(current)
            self._rank_of_slot[slots] = _NOT_QUEUED
            self._push_of_slot[slots] = _NOT_PUSHED
            popped.append(slots)
            count -= slots.shape[0]
        return np.concatenate(popped) if popped else np.empty(0, dtype=np.int64)

    def pop_idle(self) -> NDArray[np.int64]:
        """All slots of idle rows; they are no longer queued."""
        return self.pop(self._rank_of_slot.shape[0], min_rank=NEVER_RANK)

    def any_in_both(self, first: NDArray[np.int64], second: NDArray[np.int64]) -> bool:
        """Whether the two arrays share a slot."""
        self._is_marked[first] = True
        found = bool(self._is_marked.take(second).any())
        self._is_marked[first] = False
        return found

    def _bucket(self, rank: int) -> deque[_Chunk]:
        """The bucket of this rank; created if missing."""
        bucket = self._buckets.get(rank)
        if bucket is None:
            bucket = self._buckets[rank] = deque()
            heapq.heappush(self._heap, -rank)
        return bucket

    def _take(self, count: int, min_rank: int) -> list[_Chunk]:
        """Take chunks off the fronts of the highest buckets. Without the last they hold fewer than `count` entries.

        There must be a bucket of at least `min_rank`. Emptied buckets are removed.
        """
        chunks: list[_Chunk] = []
        while count > 0 and self._heap and -self._heap[0] >= min_rank:
            bucket = self._buckets[-self._heap[0]]
            chunk = bucket.popleft()
            if chunk.slots.shape[0] > max(count, _MIN_TAKEN):
                chunk, rest = chunk.cut(max(count, _MIN_TAKEN))
                bucket.appendleft(rest)
            if not bucket:
                del self._buckets[-heapq.heappop(self._heap)]
            chunks.append(chunk)
            count -= chunk.slots.shape[0]
            self._num_entries -= chunk.slots.shape[0]
        return chunks

    def _put_back(self, chunk: _Chunk) -> None:
        self._bucket(chunk.rank).appendleft(chunk)
        self._num_entries += chunk.slots.shape[0]

    def _current(self, chunks: Sequence[_Chunk]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The slots of these chunks in order, and which entries are not stale."""
        slots = np.concatenate([chunk.slots for chunk in chunks])
        pushes = np.array([chunk.push for chunk in chunks], dtype=np.int32)
        is_current = self._push_of_slot.take(slots) == pushes.repeat([chunk.slots.shape[0] for chunk in chunks])
        return slots, is_current

    def _sweep(self) -> None:
        """Drop stale and passed entries. The others keep their order, so plans do not change."""
        buckets, self._buckets, self._heap, self._num_entries = self._buckets, {}, [], 0
        self._num_pushes += 1
        for rank, bucket in buckets.items():
            slots, is_current = self._current(bucket)
            slots = slots[is_current]
            if rank > self._now and slots.shape[0]:
                self._bucket(rank).append(_Chunk(rank, self._num_pushes, slots))
                self._push_of_slot[slots] = self._num_pushes
                self._num_entries += slots.shape[0]
