"""Handles: small dense integers for the rows that the oracle tracks (rows in the window or in a cache).

    (table, id) ──lookup_or_add──> handle in [0, num_handles) ──release──> free

All other oracle state is arrays indexed by handle, so its size follows window + cache, not the vocabulary.
Two maps have the same interface: `DenseHandles` (bounded vocabularies: the handle is the row number, so these
arrays are as long as the vocabulary, 16 B a row) and `HashHandles` (any 64-bit ids, open addressing in numpy).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.lrfu import NEVER_USED, NO_SCORE, GhostScores
from bagpipe.oracle.plan import RowList
from bagpipe.types.splitmix64 import mix_rows

__all__ = ["DenseHandles", "HashHandles", "dense_sizes", "hash_rows"]

#: Vocabularies up to this many rows use the dense map (16 B a row: 1 GiB at most); larger ones the hash map.
DENSE_ROWS_LIMIT = 1 << 26
_EMPTY, _DELETED = -1, -2
#: Bits that a row sets in the Bloom filter of planned rows. All are in one word: a lookup is one memory access.
_BITS_PER_ROW = 4


def _table_numbers(rows: RowList) -> NDArray[np.int16]:
    """int16 ``[len(rows)]``: the table number of each row."""
    counts = np.diff(rows.table_offsets)
    return np.repeat(np.arange(counts.shape[0], dtype=np.int16), counts)


def hash_rows(rows: RowList) -> NDArray[np.uint64]:
    """uint64 ``[len(rows)]``: a well-mixed hash of (table number, id), the same on every machine."""
    return mix_rows(_table_numbers(rows), rows.ids)


class _Pool:
    """Allocates handles and stores the row of each one.

    Attributes:
        ids: int64 by handle. tables: int16 by handle. Entries of free handles are undefined.
    """

    def __init__(self, num_handles: int = 1024) -> None:
        self.ids = np.zeros(num_handles, dtype=np.int64)
        self.tables = np.zeros(num_handles, dtype=np.int16)
        self._free = np.arange(num_handles - 1, -1, -1, dtype=np.int64)
        self._num_free = num_handles

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by handle. Can grow with `lookup_or_add`."""
        return int(self.ids.shape[0])

    @property
    def num_used(self) -> int:
        return self.num_handles - self._num_free

    def allocate(self, tables: NDArray[np.int16], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Allocate handles for rows."""
        count = ids.shape[0]
        if count > self._num_free:
            self._grow(self.num_used + count)
        handles = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.ids[handles] = ids
        self.tables[handles] = tables
        return handles

    def free(self, handles: NDArray[np.int64]) -> None:
        count = handles.shape[0]
        self._free[self._num_free : self._num_free + count] = handles
        self._num_free += count

    def _grow(self, needed: int) -> None:
        old = self.num_handles
        new = max(2 * old, needed)
        self.ids = np.resize(self.ids, new)
        self.tables = np.resize(self.tables, new)
        free = np.empty(new, dtype=np.int64)
        added = new - old
        free[:added] = np.arange(new - 1, old - 1, -1)
        free[added : added + self._num_free] = self._free[: self._num_free]
        self._free = free
        self._num_free += added


def dense_sizes(table_rows: Sequence[int | None]) -> tuple[int, ...] | None:
    """Table sizes if `DenseHandles` can number their rows; None if a table is unbounded or all are too large."""
    bounded = tuple(rows for rows in table_rows if rows is not None)
    is_dense = len(bounded) == len(table_rows) and sum(bounded) <= DENSE_ROWS_LIMIT
    return bounded if is_dense else None


class DenseHandles:
    """Bounded vocabularies: a row's handle is its number, table after table. Keeps the score of every row."""

    def __init__(self, table_rows: tuple[int, ...]) -> None:
        self._base = np.zeros(len(table_rows) + 1, dtype=np.int64)
        np.cumsum(table_rows, out=self._base[1:])
        self._scores = np.zeros(self.num_handles, dtype=np.int32)  # NEVER_USED

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by handle."""
        return int(self._base[-1])

    def lookup_or_add(self, rows: RowList) -> NDArray[np.int64]:
        """Handles of distinct rows, int64 ``[len(rows)]``."""
        return np.repeat(self._base[:-1], np.diff(rows.table_offsets)) + rows.ids

    def rows(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Table numbers and ids."""
        tables = np.searchsorted(self._base, handles, side="right") - 1
        return tables.astype(np.int16), handles - self._base[tables]

    def release(self, handles: NDArray[np.int64]) -> None:
        """No-op: rows keep their handles."""

    def admit(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Rows enter a cache: bool, for the first time; int32, their scores at the last eviction."""
        scores = self._scores.take(handles)
        is_new: NDArray[np.bool_] = scores == NEVER_USED
        self._scores[handles[is_new]] = NO_SCORE
        return is_new, scores

    def remember(self, handles: NDArray[np.int64], scores: NDArray[np.int32]) -> None:
        """Remember the scores of evicted rows."""
        self._scores[handles] = scores


class HashHandles:
    """(table, id) -> handle by vectorised linear probing: each round advances the unresolved keys only.

    A fixed-size Bloom filter (default 2**27 bits, 16 MiB) holds the planned rows. A false positive takes a new row for
    a known one, which costs one unnecessary read: about 15 rows in a million. `GhostScores` holds the scores of evicted
    rows, in fixed memory too.

    Args:
        planned_bits: size of the filter, a power of two of at least 64.
    """

    def __init__(self, *, planned_bits: int = 1 << 27) -> None:
        self._pool = _Pool()
        self._cells = np.full(4096, _EMPTY, dtype=np.int64)
        self._num_filled = 0  # cells that are not _EMPTY, deleted ones included
        self._planned = np.zeros(planned_bits // 64, dtype=np.uint64)
        self._ghosts = GhostScores()

    def lookup_or_add(self, rows: RowList) -> NDArray[np.int64]:
        """Handles of distinct rows, int64 ``[len(rows)]``; allocated where missing."""
        tables = _table_numbers(rows)
        hashes = mix_rows(tables, rows.ids)
        handles = self._find(tables, rows.ids, hashes)
        missing = np.flatnonzero(handles < 0)
        if missing.size:
            if 2 * (self._num_filled + missing.size) > self._cells.shape[0]:
                self._rebuild(missing.size)
            new = self._pool.allocate(tables[missing], rows.ids[missing])
            self._insert(new, hashes[missing])
            handles[missing] = new
        return handles

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by handle. Can grow with `lookup_or_add`."""
        return self._pool.num_handles

    def rows(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Table numbers and ids."""
        return self._pool.tables[handles], self._pool.ids[handles]

    def release(self, handles: NDArray[np.int64]) -> None:
        """Remove the rows of these handles."""
        mask = np.uint64(self._cells.shape[0] - 1)
        cells = (mix_rows(self._pool.tables[handles], self._pool.ids[handles]) & mask).astype(np.int64)
        wanted = handles
        while wanted.size:
            here = self._cells[cells] == wanted
            self._cells[cells[here]] = _DELETED
            wanted = wanted[~here]
            cells = (cells[~here] + 1) & int(mask)
        self._pool.free(handles)

    def admit(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Rows enter a cache: bool, for the first time; int32, their scores at the last eviction.

        A new row can be taken for a known one, never the reverse. A forgotten score is `NO_SCORE`.
        """
        hashes = mix_rows(self._pool.tables[handles], self._pool.ids[handles])
        scores = self._ghosts.recall(hashes)
        marks = np.zeros(handles.shape[0], dtype=np.uint64)
        for _ in range(_BITS_PER_ROW):
            marks |= np.left_shift(np.uint64(1), hashes & np.uint64(63))
            hashes >>= np.uint64(6)
        words = (hashes & np.uint64(self._planned.shape[0] - 1)).view(np.int64)
        first: NDArray[np.bool_] = (self._planned.take(words) & marks) != marks
        while words.shape[0]:
            # Several rows can mark one word: the last write stays, the others retry. (`bitwise_or.at` is slower.)
            self._planned[words] |= marks
            lost = np.flatnonzero((self._planned.take(words) & marks) != marks)
            words, marks = words[lost], marks[lost]
        return first, scores

    def remember(self, handles: NDArray[np.int64], scores: NDArray[np.int32]) -> None:
        """Remember the scores of evicted rows. Call it before `release`."""
        self._ghosts.remember(mix_rows(self._pool.tables[handles], self._pool.ids[handles]), scores)

    def _find(self, tables: NDArray[np.int16], ids: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        mask = self._cells.shape[0] - 1
        found = np.full(ids.shape[0], _EMPTY, dtype=np.int64)
        active = np.arange(ids.shape[0])
        cells = (hashes & np.uint64(mask)).view(np.int64)
        while active.size:
            handles = self._cells.take(cells)
            # An empty or deleted cell, -1 or -2, compares with one of the last handles and never counts as a match.
            match = self._pool.ids.take(handles) == ids
            match &= self._pool.tables.take(handles) == tables
            match &= handles >= 0
            matching = np.flatnonzero(match)
            found[active.take(matching)] = handles.take(matching)
            onward = np.flatnonzero((handles != _EMPTY) & ~match)
            active, ids, tables = active.take(onward), ids.take(onward), tables.take(onward)
            cells = (cells.take(onward) + 1) & mask
        return found

    def _insert(self, handles: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        mask = self._cells.shape[0] - 1
        cells = (hashes & np.uint64(mask)).astype(np.int64)
        while handles.size:
            is_free = self._cells[cells] == _EMPTY
            # Several keys can claim one free cell: the last write stays, the others probe on.
            self._cells[cells[is_free]] = handles[is_free]
            homeless = self._cells[cells] != handles
            self._num_filled += int(handles.size - np.count_nonzero(homeless))
            handles = handles[homeless]
            cells = (cells[homeless] + 1) & mask

    def _rebuild(self, extra: int) -> None:
        """Rehash the live handles with room for `extra` more. Drops deleted cells."""
        live = self._cells[self._cells >= 0]
        size = self._cells.shape[0]
        while 4 * (live.size + extra) > size:
            size *= 2
        self._cells = np.full(size, _EMPTY, dtype=np.int64)
        self._num_filled = 0
        self._insert(live, mix_rows(self._pool.tables[live], self._pool.ids[live]))
