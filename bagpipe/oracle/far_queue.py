"""`FarQueue`: an eviction queue whose idle rows are ordered by their true next use, far beyond the window.

A batch's idle rows are used again in thousands of different batches. A bucket for each would cost a step in Python per
row. So rows enter wide buckets, and a bucket is split only when it holds the highest priorities:

    push ──> 4,096 batches wide ──at the top──> 64 batches wide ──at the top──> one batch: buckets of `EvictionQueue`
    pop  <── exact buckets above every wide one

The order is exact: a pop takes a row only when no wide bucket can hold a higher priority. A row is split off twice at
most. Rows that are never used again have one priority, the highest, and need no splitting.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.eviction import NEVER_PRIORITY, EvictionQueue, _Chunk

__all__ = ["FarQueue", "far_priority"]

#: Priority of rows that are never used again, and the largest distance from `NEVER_PRIORITY`.
_HIGHEST = (1 << 31) - 1
_MOST = _HIGHEST - NEVER_PRIORITY
#: Bits of the batch numbers that share a bucket: of the widest first, then those that it is split into.
_WIDE, _NARROW = 12, 6


def far_priority(next_use: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32: priorities of idle rows that these batches use next (`NEVER`: none), at least `NEVER_PRIORITY`."""
    priorities: NDArray[np.int32] = np.clip(next_use, 0, _MOST).astype(np.int32)
    priorities += np.int32(NEVER_PRIORITY)
    return priorities


class FarQueue(EvictionQueue):
    """As `EvictionQueue`. Priorities of idle rows are those of `far_priority`; the rows of a push are all idle or none.

    Steps in Python per push: batches of the log / 4,096. Per pop: at most 128, and the exact buckets that it empties.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Wide buckets by (minus the highest priority they can hold, bits); the heap has the same keys.
        self._wide: dict[tuple[int, int], deque[_Chunk]] = {}
        self._wide_heap: list[tuple[int, int]] = []

    def push(self, slots: NDArray[np.int64], priorities: NDArray[np.int32]) -> None:
        """See `EvictionQueue.push`."""
        if not slots.shape[0] or priorities[0] < NEVER_PRIORITY:
            super().push(slots, priorities)
            return
        is_last = priorities == _HIGHEST
        super().push(slots[is_last], priorities[is_last])
        self._push_wide(slots[~is_last], priorities[~is_last], _WIDE)
        if self._num_entries > 4 * self._priority_of_slot.shape[0] + slots.shape[0]:
            self._sweep()

    def pop(self, count: int, min_priority: int = 0) -> NDArray[np.int64]:
        """See `EvictionQueue.pop`."""
        popped = []
        while count > 0:
            highest = -self._wide_heap[0][0] if self._wide_heap else -1
            popped.append(super().pop(count, max(min_priority, highest + 1)))
            count -= popped[-1].shape[0]
            if not self._wide_heap or highest < min_priority:
                break
            if count > 0:
                self._split()
        return np.concatenate(popped) if popped else np.empty(0, dtype=np.int64)

    def _push_wide(self, slots: NDArray[np.int64], priorities: NDArray[np.int32], bits: int) -> None:
        if not slots.shape[0]:
            return
        self._num_pushes += 1
        self._priority_of_slot[slots] = priorities
        self._push_of_slot[slots] = self._num_pushes
        keys = priorities >> np.int32(bits)
        lowest = int(keys.min())
        span = int(keys.max()) - lowest
        # As in `EvictionQueue.push`: a stable sort of 16 bits is a radix sort.
        by_key = np.argsort((keys - lowest).astype(np.uint16) if span < 1 << 16 else keys, kind="stable")
        slots, keys = slots.take(by_key), keys.take(by_key)
        starts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()]
        for start, stop, key in zip(starts, [*starts[1:], slots.shape[0]], keys.take(starts).tolist(), strict=True):
            highest = (key + 1 << bits) - 1
            self._wide_bucket((-highest, bits)).append(_Chunk(highest, self._num_pushes, slots[start:stop].copy()))
        self._num_entries += slots.shape[0]

    def _wide_bucket(self, key: tuple[int, int]) -> deque[_Chunk]:
        bucket = self._wide.get(key)
        if bucket is None:
            bucket = self._wide[key] = deque()
            heapq.heappush(self._wide_heap, key)
        return bucket

    def _split(self) -> None:
        """Move the rows of the highest wide bucket into narrower ones. Stale entries are dropped."""
        key = heapq.heappop(self._wide_heap)
        slots, is_current = self._current(self._wide.pop(key))
        self._num_entries -= slots.shape[0]
        slots = slots[is_current]
        priorities = self._priority_of_slot.take(slots)
        if key[1] == _WIDE:
            self._push_wide(slots, priorities, _NARROW)
        else:
            super().push(slots, priorities)

    def _sweep(self) -> None:
        """See `EvictionQueue`."""
        super()._sweep()
        wide, self._wide, self._wide_heap = self._wide, {}, []
        self._num_pushes += 1
        for key, bucket in wide.items():
            slots, is_current = self._current(bucket)
            slots = slots[is_current]
            if slots.shape[0]:
                self._wide_bucket(key).append(_Chunk(-key[0], self._num_pushes, slots))
                self._push_of_slot[slots] = self._num_pushes
                self._num_entries += slots.shape[0]
