"""Eviction order: a bucket queue over slots, and the policies that order them.

Every evictable slot has a *priority*; the highest is evicted first. The priority of a row with a next use in the window
is that batch index; the priority of an idle row (no use in the window) follows from its LRFU score. The queue keeps
slots in buckets by priority, in push order within a bucket, and drops stale entries when it meets them:

    push(slots, priorities) ──> bucket[priority] = [chunk, chunk, …]      push_of_slot[slot] = number of this push
    pop(k)             ──> highest bucket first; an entry is stale if its slot was pushed again since

Rows that were used once share a priority, so a bucket can hold much of the cache: a pop takes entries off its front and
leaves the others in place. Both operations are O(entries pushed or met) in numpy. Python loops run over the distinct
priorities of a batch and over chunks, never over slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.lrfu import TICKS
from bagpipe.types.batch import NO_USE

__all__ = ["NEVER", "NEVER_PRIORITY", "POLICIES", "EvictionQueue", "Policy", "idle_priority"]

#: Next use of an idle row: no use in the window.
NEVER = NO_USE
#: Priorities at or above this belong to idle rows. Batch indices stay below it.
NEVER_PRIORITY = 1 << 30
_OLDEST_PRIORITY = (1 << 31) - 1
_NOT_QUEUED = -1
_NOT_PUSHED = 0
#: A pop takes at least this many entries of a chunk, so that few passes suffice when most entries are stale.
_MIN_TAKEN = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """An eviction policy. Rows with a next use in the window leave last, farthest next use first (Belady 1966).

    Attributes:
        drop_idle: evict idle rows immediately, even while there is room; else only when room is needed, lowest score
            first (`idle_priority`).
    """

    drop_idle: bool = False


POLICIES: Mapping[str, Policy] = {
    "belady-window": Policy(),
    "drop-unused": Policy(drop_idle=True),
}

#: Score ticks that share a priority: a sixteenth of a half-life, less than 5 % of a row's weight.
_TICKS_OF_PRIORITY = TICKS // 16


def idle_priority(scores: NDArray[np.int32]) -> NDArray[np.int32]:
    """int32: priorities of idle rows with these LRFU scores, at least `NEVER_PRIORITY`."""
    priorities: NDArray[np.int32] = np.int32(_OLDEST_PRIORITY) - scores // np.int32(_TICKS_OF_PRIORITY)
    return priorities


class _Chunk(NamedTuple):
    """Entries of one priority from one push.

    Attributes:
        priority: of these entries.
        push: number of the push.
        slots: int64, distinct.
    """

    priority: int
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
        return _Chunk(self.priority, self.push, self.slots[:count]), _Chunk(self.priority, self.push, rest)


class EvictionQueue:
    """Slots by priority. Stale entries are skipped when met, and swept when entries outnumber slots 4 to 1.

    Priorities below `NEVER_PRIORITY` are batch indices. Those up to the batch being planned have passed: their slots
    count as not queued, so using a row needs no removal.
    """

    def __init__(self, num_slots: int) -> None:
        self._priority_of_slot = np.full(num_slots, _NOT_QUEUED, dtype=np.int32)
        self._push_of_slot = np.full(num_slots, _NOT_PUSHED, dtype=np.int32)
        self._is_marked = np.zeros(num_slots, dtype=np.bool_)
        self._buckets: dict[int, deque[_Chunk]] = {}
        self._heap: list[int] = []
        self._num_entries = 0
        self._num_pushes = 0
        self._now = _NOT_QUEUED

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots. Queued slots stay queued."""
        more = num_slots - self._priority_of_slot.shape[0]
        if more > 0:
            more += num_slots // 4 if self._priority_of_slot.shape[0] else 0  # so that few growths copy
            self._priority_of_slot = np.pad(self._priority_of_slot, (0, more), constant_values=_NOT_QUEUED)
            self._push_of_slot = np.pad(self._push_of_slot, (0, more), constant_values=_NOT_PUSHED)
            self._is_marked = np.pad(self._is_marked, (0, more))

    @property
    def num_entries(self) -> int:
        """Entries held, stale ones included: at most 4 per slot plus one batch."""
        return self._num_entries

    def advance(self, batch_index: int) -> None:
        """Planning reaches this batch: priorities up to it have passed."""
        self._now = batch_index

    def push(self, slots: NDArray[np.int64], priorities: NDArray[np.int32]) -> None:
        """Make distinct slots evictable, or change their priorities. Fastest if those of a call lie close together."""
        if not slots.shape[0]:
            return
        self._num_pushes += 1
        self._priority_of_slot[slots] = priorities
        self._push_of_slot[slots] = self._num_pushes
        lowest = int(priorities.min())
        span = int(priorities.max()) - lowest
        self._num_entries += slots.shape[0]
        if span == 0:
            self._bucket(lowest).append(_Chunk(lowest, self._num_pushes, slots.copy()))
        else:
            self._push_sorted(slots, priorities, lowest, span)
        if self._num_entries > 4 * self._priority_of_slot.shape[0] + slots.shape[0]:
            self._sweep()

    def _push_sorted(self, slots: NDArray[np.int64], priorities: NDArray[np.int32], lowest: int, span: int) -> None:
        """Put slots into the buckets of their priorities, which lie from `lowest` to `lowest` + `span`."""
        # A 16-bit key lets numpy's stable sort be a radix sort; priorities of a batch span at most the window.
        keys = (priorities - lowest).astype(np.uint16) if span < 1 << 16 else priorities
        by_priority = np.argsort(keys, kind="stable")
        sorted_slots, priorities = slots.take(by_priority), priorities.take(by_priority)
        starts = [0, *(np.flatnonzero(priorities[1:] != priorities[:-1]) + 1).tolist()]
        ends = [*starts[1:], slots.shape[0]]
        buckets, push = self._buckets, self._num_pushes
        for start, stop, priority in zip(starts, ends, priorities.take(starts).tolist(), strict=True):
            bucket = buckets.get(priority) or self._bucket(priority)
            # A copy: a view would keep the whole push in memory for a few entries.
            bucket.append(_Chunk(priority, push, sorted_slots[start:stop].copy()))

    def is_queued(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        queued: NDArray[np.bool_] = self._priority_of_slot.take(slots) > self._now
        return queued

    def pop(self, count: int, min_priority: int = 0) -> NDArray[np.int64]:
        """Up to `count` slots of the highest priorities, none below `min_priority`; they are no longer queued."""
        min_priority = max(min_priority, self._now + 1)
        popped: list[NDArray[np.int64]] = []
        while count > 0 and self._heap and -self._heap[0] >= min_priority:
            chunks = self._take(count, min_priority)
            slots, is_current = self._current(chunks)
            current = np.flatnonzero(is_current)
            if current.shape[0] > count:
                # Without the last chunk there are fewer entries than wanted, so the surplus is at its end.
                last = chunks[-1]
                num_met = int(current[count]) - (slots.shape[0] - last.slots.shape[0])
                self._put_back(last.cut(num_met)[1])
                current = current[:count]
            slots = slots.take(current)
            self.remove(slots)
            popped.append(slots)
            count -= slots.shape[0]
        return np.concatenate(popped) if popped else np.empty(0, dtype=np.int64)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Make slots not evictable; those that are not queued stay so."""
        self._priority_of_slot[slots] = _NOT_QUEUED
        self._push_of_slot[slots] = _NOT_PUSHED

    def pop_idle(self) -> NDArray[np.int64]:
        """All slots of idle rows; they are no longer queued."""
        return self.pop(self._priority_of_slot.shape[0], min_priority=NEVER_PRIORITY)

    def are_among(self, slots: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool ``[len(slots)]``: whether each slot is one of the others."""
        self._is_marked[others] = True
        found = self._is_marked.take(slots)
        self._is_marked[others] = False
        return found

    def _bucket(self, priority: int) -> deque[_Chunk]:
        """The bucket of this priority; created if missing."""
        bucket = self._buckets.get(priority)
        if bucket is None:
            bucket = self._buckets[priority] = deque()
            heapq.heappush(self._heap, -priority)
        return bucket

    def _take(self, count: int, min_priority: int) -> list[_Chunk]:
        """Take chunks off the fronts of the highest buckets. Without the last they hold fewer than `count` entries.

        There must be a bucket of at least `min_priority`. Emptied buckets are removed.
        """
        chunks: list[_Chunk] = []
        while count > 0 and self._heap and -self._heap[0] >= min_priority:
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
        self._bucket(chunk.priority).appendleft(chunk)
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
        for priority, bucket in buckets.items():
            slots, is_current = self._current(bucket)
            slots = slots[is_current]
            if priority > self._now and slots.shape[0]:
                self._bucket(priority).append(_Chunk(priority, self._num_pushes, slots))
                self._push_of_slot[slots] = self._num_pushes
                self._num_entries += slots.shape[0]
