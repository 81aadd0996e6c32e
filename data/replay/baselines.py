"""Misses of other cache policies, computed from row numbers alone, independently of the oracle's code.

batches ──rows of batch b──> hits leave the queue, misses enter ──too many?──> lowest keys leave ──> rows get new keys
        └──backwards──> next uses, on disk (offline-belady)       └──> ranks by use over the whole log (static-hot)

All rows of a batch are resident together, as training needs them. Caches of several ranks count as one. A policy is the
key that it assigns to the rows of a batch; the lowest key leaves first, rows with equal keys in the order of their
batch. Rows that expire leave the cache before a batch, unwritten:

| policy         | key                                                                                          |
|----------------|----------------------------------------------------------------------------------------------|
| lru            | the batch of the last use                                                                    |
| lfu            | batches that used the row since it entered (in-cache LFU), then the batch of the last use    |
| offline-belady | the next use in the whole log, farthest first (Belady 1966): no policy misses less. First    |
|                | come rows that expire before their next use: they miss it anyway                             |
| static-hot     | none: the rows used most in the whole log stay; all others leave after each batch            |
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError, InputError
from data.replay.next_use_file import NextUseFile
from data.replay.row_batch_file import RowBatches

__all__ = ["BASELINES", "Counts", "run_baseline"]

#: Keys of rows outside the cache, and of rows that the current batch uses. Keys in the queue are all others.
_ABSENT = np.iinfo(np.int64).min
_PINNED = _ABSENT + 1
#: Beyond all next uses.
_LATER = 1 << 32
_NO_ROWS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Costs of a policy over a whole log.

    Attributes:
        rows_unique: unique rows, summed over batches.
        misses: of those, rows that were not resident when their batch came.
        peak_rows: most resident rows.
        misses_by_group: `misses`, by the group of the row; empty without groups.
        dropped: rows that expired while they were resident. dropped_by_group: as `misses_by_group`.
    """

    rows_unique: int
    misses: int
    peak_rows: int
    misses_by_group: tuple[int, ...] = ()
    dropped: int = 0
    dropped_by_group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The batches, the rows that expire before each, the number of rows, the slots, and the group of each row."""

    batches: RowBatches
    expired: RowBatches | None
    num_rows: int
    num_slots: int
    world_size: int
    folder: Path
    group_of_row: NDArray[np.int16]

    def batch(self, number: int) -> NDArray[np.int32]:
        """Rows of a batch. Raises CapacityError if they do not fit."""
        rows = self.batches[number]
        if rows.shape[0] > self.num_slots:
            raise CapacityError.of_batch(number, rows.shape[0], num_slots=self.num_slots, world_size=self.world_size)
        return rows

    def expired_at(self, number: int) -> NDArray[np.int32]:
        """Rows that expire before a batch."""
        return _NO_ROWS if self.expired is None else self.expired[number]


def run_baseline(
    policy: str,
    batches: RowBatches,
    *,
    num_rows: int,
    num_slots: int,
    folder: Path,
    world_size: int = 1,
    group_of_row: NDArray[np.int16] | None = None,
    expired: RowBatches | None = None,
) -> Counts:
    """Replay a policy over a log.

    Args:
        policy: a key of `BASELINES`.
        batches: int32 arrays of distinct row numbers in ``[0, num_rows)``.
        num_slots: slots of all ranks together.
        folder: for temporary files as large as the log.
        world_size: ranks, for error messages.
        group_of_row: int16 ``[num_rows]``, the groups of `Counts.misses_by_group`; None: no groups.
        expired: rows that expire before each batch; None: none does.

    Raises:
        CapacityError: a batch has more rows than there are slots.
        InputError: unknown policy.
    """
    if policy not in BASELINES:
        raise InputError(f"policy must be one of {', '.join(sorted(BASELINES))}, got {policy!r}")
    log = _Log(
        batches=batches,
        expired=expired,
        num_rows=num_rows,
        num_slots=num_slots,
        world_size=world_size,
        folder=folder,
        group_of_row=np.empty(0, dtype=np.int16) if group_of_row is None else group_of_row,
    )
    return BASELINES[policy](log)


class _RowCount:
    """Counts rows, by group if there are any."""

    def __init__(self, log: _Log) -> None:
        self._group_of_row = log.group_of_row
        self._by_group = np.zeros(int(log.group_of_row.max(initial=-1)) + 1, dtype=np.int64)
        self.total = 0

    def add(self, rows: NDArray[np.int32]) -> None:
        self.total += rows.shape[0]
        if self._by_group.shape[0]:
            self._by_group += np.bincount(self._group_of_row[rows], minlength=self._by_group.shape[0])

    def by_group(self) -> tuple[int, ...]:
        return tuple(self._by_group.tolist())


class _Keys(Protocol):
    def __call__(self, number: int, rows: NDArray[np.int32], entered: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Keys of the rows of batch `number`; `entered` are the positions of those that just entered the cache."""
        ...


class _Queue:
    """Resident rows by key. An entry is valid while its row has that key; a row never gets the same key twice.

    The keys of a batch's rows fall into few buckets; loops run over buckets.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.key = np.full(num_rows, _ABSENT, dtype=np.int64)
        self._buckets: dict[int, list[NDArray[np.int32]]] = {}
        self._heap: list[int] = []
        self._num_entries = 0
        self._num_slots = num_slots

    def push(self, rows: NDArray[np.int32], keys: NDArray[np.int64]) -> None:
        """Assign keys to rows."""
        self.key[rows] = keys
        self._append(rows, keys)
        if self._num_entries > 4 * self._num_slots + rows.shape[0]:
            self._sweep()

    def drop(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Remove those of the rows that are resident, and return them."""
        resident: NDArray[np.int32] = rows[self.key[rows] != _ABSENT]
        self.key[resident] = _ABSENT
        return resident

    def pop(self, count: int) -> None:
        """Remove the `count` rows with the lowest keys; the queue must hold as many."""
        while count:
            key = heapq.heappop(self._heap)
            rows = np.concatenate(self._buckets.pop(key))
            self._num_entries -= rows.shape[0]
            rows = rows[self.key[rows] == key]
            leaving, staying = rows[:count], rows[count:]
            self.key[leaving] = _ABSENT
            if staying.shape[0]:
                self._put(key, staying)
            count -= leaving.shape[0]

    def _append(self, rows: NDArray[np.int32], keys: NDArray[np.int64]) -> None:
        if not rows.shape[0]:
            return
        by_key = np.argsort(keys, kind="stable")
        rows, keys = rows[by_key], keys[by_key]
        starts = [0, *(np.flatnonzero(keys[1:] != keys[:-1]) + 1).tolist()]
        for start, stop, key in zip(starts, [*starts[1:], rows.shape[0]], keys[starts].tolist(), strict=True):
            self._put(key, rows[start:stop])

    def _put(self, key: int, rows: NDArray[np.int32]) -> None:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = []
            heapq.heappush(self._heap, key)
        bucket.append(rows)
        self._num_entries += rows.shape[0]

    def _sweep(self) -> None:
        """Drop invalid entries, bucket by bucket, so that ties keep their order."""
        for key, bucket in list(self._buckets.items()):
            rows = np.concatenate(bucket)
            rows = rows[self.key[rows] == key]
            if rows.shape[0]:
                self._buckets[key] = [rows]
            else:
                del self._buckets[key]
        self._heap = list(self._buckets)
        heapq.heapify(self._heap)
        self._num_entries = sum(bucket[0].shape[0] for bucket in self._buckets.values())


def _replay(log: _Log, keys_of: _Keys) -> Counts:
    """Run the batches through a cache that evicts the lowest keys, and only when it needs slots."""
    queue, misses, dropped = _Queue(log.num_rows, log.num_slots), _RowCount(log), _RowCount(log)
    rows_unique = resident = peak = 0
    for number in range(len(log.batches)):
        rows = log.batch(number)
        gone = queue.drop(log.expired_at(number))
        dropped.add(gone)
        resident -= gone.shape[0]
        entered = np.flatnonzero(queue.key[rows] == _ABSENT)
        queue.key[rows] = _PINNED
        leaving = max(0, resident + entered.shape[0] - log.num_slots)
        queue.pop(leaving)
        queue.push(rows, keys_of(number, rows, entered))
        rows_unique += rows.shape[0]
        misses.add(rows[entered])
        resident += entered.shape[0] - leaving
        peak = max(peak, resident)
    return _counts(rows_unique, peak, misses, dropped)


def _counts(rows_unique: int, peak_rows: int, misses: _RowCount, dropped: _RowCount) -> Counts:
    return Counts(
        rows_unique=rows_unique,
        misses=misses.total,
        peak_rows=peak_rows,
        misses_by_group=misses.by_group(),
        dropped=dropped.total,
        dropped_by_group=dropped.by_group(),
    )


def _lru(log: _Log) -> Counts:
    return _replay(log, lambda number, rows, entered: np.full(rows.shape[0], number, dtype=np.int64))


def _lfu(log: _Log) -> Counts:
    uses = np.zeros(log.num_rows, dtype=np.int32)

    def keys_of(number: int, rows: NDArray[np.int32], entered: NDArray[np.int64]) -> NDArray[np.int64]:
        uses[rows[entered]] = 0
        uses[rows] += 1
        return (uses[rows].astype(np.int64) << 32) + number

    return _replay(log, keys_of)


def _offline_belady(log: _Log) -> Counts:
    with NextUseFile(log.batches, log.num_rows, log.folder, expired=log.expired) as next_uses:

        def keys_of(number: int, rows: NDArray[np.int32], entered: NDArray[np.int64]) -> NDArray[np.int64]:
            found = next_uses[number].astype(np.int64)
            return -np.where(found < 0, ~found + _LATER, found)

        return _replay(log, keys_of)


def _static_hot(log: _Log) -> Counts:
    """Keep the K most used rows, with the largest K for which every batch still fits.

    A batch of u rows needs ``K + (its rows outside the first K)`` slots: it fits while the first K hold at most
    ``num_slots - u`` rows of other batches. Of those, ``rank[i] - i`` come before its i-th row in order of use.
    """
    uses = np.zeros(log.num_rows, dtype=np.int32)
    for number in range(len(log.batches)):
        uses[log.batch(number)] += 1
    rank = np.empty(log.num_rows, dtype=np.int32)
    rank[np.argsort(-uses, kind="stable")] = np.arange(log.num_rows, dtype=np.int32)
    num_hot = min(log.num_rows, log.num_slots)
    for number in range(len(log.batches)):
        ranks = np.sort(rank[log.batches[number]])
        spare = log.num_slots - ranks.shape[0]
        num_hot = min(num_hot, spare + int(np.searchsorted(ranks - np.arange(ranks.shape[0]), spare, side="right")))

    is_resident, misses, dropped = np.zeros(log.num_rows, dtype=np.bool_), _RowCount(log), _RowCount(log)
    rows_unique = resident = peak = 0
    for number in range(len(log.batches)):
        rows, gone = log.batches[number], log.expired_at(number)
        gone = gone[is_resident[gone]]
        is_resident[gone] = False
        dropped.add(gone)
        resident -= gone.shape[0]
        is_hot = rank[rows] < num_hot
        missed = rows[~(is_hot & is_resident[rows])]
        is_resident[rows[is_hot]] = True
        cold = rows.shape[0] - int(np.count_nonzero(is_hot))
        resident += missed.shape[0] - cold
        rows_unique += rows.shape[0]
        misses.add(missed)
        peak = max(peak, resident + cold)
    return _counts(rows_unique, peak, misses, dropped)


#: Policies by name.
BASELINES: Mapping[str, Callable[[_Log], Counts]] = {
    "lru": _lru,
    "lfu": _lfu,
    "offline-belady": _offline_belady,
    "static-hot": _static_hot,
}
