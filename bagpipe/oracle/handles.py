"""Handles: small dense integers for the rows that the oracle tracks (rows in the window or in a cache).

    (table, id) ──lookup_or_add──> handle in [0, num_handles) ──release──> free

All other oracle state is arrays indexed by handle, so its size follows window + cache, not the vocabulary.
Two maps have the same interface: `DenseHandles` (bounded vocabularies: the handle is the row number, so these
arrays are as long as the vocabulary, 16 B a row) and `HashHandles` (any 64-bit ids, open addressing in numpy).

A cell of `HashHandles` is one word, upper half of the row's hash over its handle, so most probes read no more than the
cell. (table, hash) names a row exactly, as the hash is a bijection of the id within each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.lrfu import NEVER_USED, NO_SCORE, GhostScores
from bagpipe.oracle.plan import RowList
from bagpipe.types.splitmix64 import mix_rows

__all__ = ["DenseHandles", "HashHandles", "dense_sizes", "grown", "hash_rows", "make_handles"]

_Number = TypeVar("_Number", np.int32, np.uint32)

#: Vocabularies up to this many rows use the dense map (16 B a row: 1 GiB at most); larger ones the hash map.
DENSE_ROWS_LIMIT = 1 << 26
#: Cells without a handle. The upper half of the others begins with a bit that is set.
_EMPTY, _DELETED = np.uint64(0), np.uint64(1)
_IN_USE, _UPPER, _LOWER = np.uint64(1 << 63), np.uint64(0xFFFFFFFF << 32), np.uint64(0xFFFFFFFF)
#: Cells looked at in one step, where the first one does not settle it: those of a cache line.
_WINDOW = 8
_WINDOW_STEPS = np.arange(_WINDOW)
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
        ids: int64 by handle. tables: int16 by handle. hashes: uint64 by handle, see `hash_rows`. Entries of free
            handles are undefined.
    """

    def __init__(self, num_handles: int = 1024) -> None:
        self.ids = np.zeros(num_handles, dtype=np.int64)
        self.tables = np.zeros(num_handles, dtype=np.int16)
        self.hashes = np.zeros(num_handles, dtype=np.uint64)
        self._free = np.arange(num_handles - 1, -1, -1, dtype=np.int64)
        self._num_free = num_handles

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by handle. Can grow with `lookup_or_add`."""
        return int(self.ids.shape[0])

    @property
    def num_used(self) -> int:
        return self.num_handles - self._num_free

    def allocate(
        self, tables: NDArray[np.int16], ids: NDArray[np.int64], hashes: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        """Allocate handles for rows."""
        count = ids.shape[0]
        if count > self._num_free:
            self._grow(self.num_used + count)
        handles = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.ids[handles] = ids
        self.tables[handles] = tables
        self.hashes[handles] = hashes
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
        self.hashes = np.resize(self.hashes, new)
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

    def find(self, rows: RowList) -> NDArray[np.int64]:
        """Handles of distinct rows, int64 ``[len(rows)]``; here every row has one."""
        return self.lookup_or_add(rows)

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

    def remember(self, handles: NDArray[np.int64], scores: NDArray[np.int32], counts: Sequence[int]) -> None:
        """Remember the scores of rows that ranks evict, so many by each."""
        self._scores[handles] = scores


class HashHandles:
    """(table, id) -> handle by vectorised linear probing: each step advances the unresolved rows only.

    A fixed-size Bloom filter (default 2**27 bits, 16 MiB) holds the planned rows. A false positive takes a new row for
    a known one, which costs one unnecessary read: about 15 rows in a million. `GhostScores` holds the scores of evicted
    rows, in fixed memory too.

    Args:
        planned_bits: size of the filter, a power of two of at least 64.
    """

    def __init__(self, *, planned_bits: int = 1 << 27) -> None:
        self._pool = _Pool()
        self._cells = np.full(4096, _EMPTY, dtype=np.uint64)
        self._num_filled = 0  # cells that are not _EMPTY, deleted ones included
        self._planned = np.zeros(planned_bits // 64, dtype=np.uint64)
        self._ghosts = GhostScores()

    def lookup_or_add(self, rows: RowList) -> NDArray[np.int64]:
        """Handles of distinct rows, int64 ``[len(rows)]``; allocated where missing."""
        tables = _table_numbers(rows)
        hashes = mix_rows(tables, rows.ids)
        handles = self._find(tables, hashes)
        missing = np.flatnonzero(handles < 0)
        if missing.size:
            if 2 * (self._num_filled + missing.size) > self._cells.shape[0]:
                self._rebuild(missing.size)
            new_hashes = hashes.take(missing)
            new = self._pool.allocate(tables.take(missing), rows.ids.take(missing), new_hashes)
            self._insert(new, new_hashes)
            handles[missing] = new
        return handles

    def find(self, rows: RowList) -> NDArray[np.int64]:
        """Handles of distinct rows, int64 ``[len(rows)]``; -1 where there is none."""
        tables = _table_numbers(rows)
        return self._find(tables, mix_rows(tables, rows.ids))

    @property
    def num_handles(self) -> int:
        """Length of arrays indexed by handle. Can grow with `lookup_or_add`."""
        return self._pool.num_handles

    def rows(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Table numbers and ids."""
        return self._pool.tables.take(handles), self._pool.ids.take(handles)

    def release(self, handles: NDArray[np.int64]) -> None:
        """Remove the rows of these handles."""
        hashes = self._pool.hashes.take(handles)
        words = _cell_words(hashes, handles)
        cells = self._first_cells(hashes)
        is_here = self._cells.take(cells) == words
        self._cells[cells.take(np.flatnonzero(is_here))] = _DELETED
        left = np.flatnonzero(~is_here)
        words, cells = words.take(left), cells.take(left) + 1
        while words.size:
            window = self._window(cells)
            places = np.flatnonzero(self._cells.take(window) == words[:, None])
            self._cells[window.reshape(-1).take(places)] = _DELETED
            is_left = np.ones(words.shape[0], dtype=np.bool_)
            is_left[places // _WINDOW] = False
            left = np.flatnonzero(is_left)
            words, cells = words.take(left), cells.take(left) + _WINDOW
        self._pool.free(handles)

    def admit(self, handles: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
        """Rows enter a cache: bool, for the first time; int32, their scores at the last eviction.

        A new row can be taken for a known one, never the reverse. A forgotten score is `NO_SCORE`.
        """
        hashes = self._pool.hashes.take(handles)
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

    def remember(self, handles: NDArray[np.int64], scores: NDArray[np.int32], counts: Sequence[int]) -> None:
        """Remember the scores of rows that ranks evict, so many by each. Call it before `release`."""
        self._ghosts.remember(self._pool.hashes.take(handles), scores, counts)

    def _first_cells(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The cell where the probing of each row begins."""
        return (hashes & np.uint64(self._cells.shape[0] - 1)).view(np.int64)

    def _window(self, cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 ``[len(cells), _WINDOW]``: each cell and those that follow it, around the end."""
        return (cells[:, None] + _WINDOW_STEPS) & (self._cells.shape[0] - 1)

    def _find(self, tables: NDArray[np.int16], hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Handles of rows; -1 where there is none."""
        found = np.full(hashes.shape[0], -1, dtype=np.int64)
        wanted = hashes | _IN_USE
        cells = self._first_cells(hashes)
        words = self._cells.take(cells)
        # The first cell of most rows is theirs, so nothing is selected. An empty one seems to be of handle 0.
        handles = (words & _LOWER).view(np.int64)
        is_same = self._pool.hashes.take(handles) == hashes
        is_same &= self._pool.tables.take(handles) == tables
        is_same &= words > _DELETED
        np.copyto(found, handles, where=is_same)
        active = np.flatnonzero((found < 0) & (words != _EMPTY))
        cells = cells.take(active) + 1
        while active.size:
            words = self._cells.take(self._window(cells))
            places = np.flatnonzero((words ^ wanted.take(active)[:, None]) <= _LOWER)
            rows = active.take(places // _WINDOW)
            self._match(found, rows, words.reshape(-1).take(places), tables, hashes)
            # A row lies before the first empty cell.
            onward = np.flatnonzero((found.take(active) < 0) & ~_any_of_window(words == _EMPTY))
            active, cells = active.take(onward), cells.take(onward) + _WINDOW
        return found

    def _match(
        self,
        found: NDArray[np.int64],
        rows: NDArray[np.int64],
        words: NDArray[np.uint64],
        tables: NDArray[np.int16],
        hashes: NDArray[np.uint64],
    ) -> None:
        """Write the handles of these rows into `found` where the cells that they seem to be in are theirs."""
        handles = (words & _LOWER).view(np.int64)
        is_same = self._pool.hashes.take(handles) == hashes.take(rows)
        is_same &= self._pool.tables.take(handles) == tables.take(rows)
        same = np.flatnonzero(is_same)
        found[rows.take(same)] = handles.take(same)

    def _insert(self, handles: NDArray[np.int64], hashes: NDArray[np.uint64]) -> None:
        """Put rows that have no cell into the first free ones from theirs on."""
        words, cells = _cell_words(hashes, handles), self._first_cells(hashes)
        homeless = self._claim(words, cells)
        words, cells = words.take(homeless), cells.take(homeless) + 1
        while words.size:
            window = self._window(cells)
            is_free = self._cells.take(window) <= _DELETED
            first = is_free.argmax(axis=1)
            is_full = ~_any_of_window(is_free)
            places = np.arange(0, is_free.size, _WINDOW) + first
            homeless = self._claim(words, window.reshape(-1).take(places))
            words, cells = words.take(homeless), (cells + _WINDOW * is_full).take(homeless)

    def _claim(self, words: NDArray[np.uint64], cells: NDArray[np.int64]) -> NDArray[np.int64]:
        """Write words into their cells where those are free. Returns the positions of those without one."""
        before = self._cells.take(cells)
        claimed = np.flatnonzero(before <= _DELETED)
        self._cells[cells.take(claimed)] = words.take(claimed)
        # Several rows can claim one free cell: the last write stays.
        is_home = self._cells.take(cells) == words
        self._num_filled += int(np.count_nonzero(is_home & (before == _EMPTY)))
        return np.flatnonzero(~is_home)

    def _rebuild(self, extra: int) -> None:
        """Rehash the live handles with room for `extra` more. Drops deleted cells."""
        live = (self._cells[self._cells > _DELETED] & _LOWER).view(np.int64)
        size = self._cells.shape[0]
        while 4 * (live.size + extra) > size:
            size *= 2
        self._cells = np.full(size, _EMPTY, dtype=np.uint64)
        self._num_filled = 0
        self._insert(live, self._pool.hashes.take(live))


def grown(array: NDArray[_Number], num_handles: int, fill: int) -> NDArray[_Number]:
    """An array by handle with room for so many handles; the array itself if it has it.

    Args:
        array: one dimension.
        num_handles: see `DenseHandles.num_handles`.
        fill: of the new elements.
    """
    more = num_handles - array.shape[0]
    return np.pad(array, (0, more), constant_values=fill) if more > 0 else array


def make_handles(table_rows: Sequence[int | None], *, planned_bits: int = 1 << 27) -> DenseHandles | HashHandles:
    """The handles for the rows of these tables; `planned_bits`: see `HashHandles`."""
    sizes = dense_sizes(table_rows)
    return HashHandles(planned_bits=planned_bits) if sizes is None else DenseHandles(sizes)


def _any_of_window(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool ``[rows]``: whether any flag of a row is set. A row of `_WINDOW` flags is one word."""
    found: NDArray[np.bool_] = flags.view(np.uint64).reshape(-1) != 0
    return found


def _cell_words(hashes: NDArray[np.uint64], handles: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The words of the cells of these rows."""
    return ((hashes | _IN_USE) & _UPPER) | handles.view(np.uint64)
