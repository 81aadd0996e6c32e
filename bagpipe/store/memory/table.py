"""`Table`: rows of one table in numpy arrays, found by a hash index.

ids ──hash, linear probing, all ids at once──> row numbers ──> rows array (append only, doubles when full)
                                                    └─────────> alive: false for removed rows

A removed row keeps its number until its id is written again. Once half of the rows are removed ones, the others move to
new arrays; so a removal takes constant time per id on average.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import Rows
from bagpipe.store.keys import bucket_of

__all__ = ["Table"]

_EMPTY = -1
_MIN_SLOTS = 1024


class _IdIndex:
    """Open-addressing hash table from id to row number. Every operation is vectorised over ids.

    A dict takes 4 to 14 times as long per lookup (1,000 to 100,000 ids of 2 million).
    """

    def __init__(self) -> None:
        self._row_numbers = np.full(_MIN_SLOTS, _EMPTY, np.int64)
        self.ids = np.empty(_MIN_SLOTS // 2, np.int64)  # id of each row number
        self.num_rows = 0

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row number of each id, -1 if absent."""
        result = np.full(len(ids), _EMPTY, np.int64)
        pending = np.arange(len(ids))
        slots = self._first_slots(ids)
        while len(pending):
            here = self._row_numbers[slots]
            taken = here != _EMPTY
            match = taken & (self.ids[here] == ids[pending])
            result[pending[match]] = here[match]
            onward = taken & ~match
            pending, slots = pending[onward], (slots[onward] + 1) & (len(self._row_numbers) - 1)
        return result

    def insert(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give each id the next row number. Ids must be distinct and absent."""
        first, self.num_rows = self.num_rows, self.num_rows + len(ids)
        if self.num_rows > len(self.ids):
            capacity = 1 << (self.num_rows - 1).bit_length()
            self.ids = np.concatenate([self.ids[:first], np.empty(capacity - first, np.int64)])
            # At most half full, so that probe sequences stay short.
            self._row_numbers = np.full(2 * capacity, _EMPTY, np.int64)
            self._place(np.arange(first))
        row_numbers = np.arange(first, self.num_rows)
        self.ids[row_numbers] = ids
        self._place(row_numbers)
        return row_numbers

    def _place(self, row_numbers: NDArray[np.int64]) -> None:
        slots = self._first_slots(self.ids[row_numbers])
        while len(row_numbers):
            free = self._row_numbers[slots] == _EMPTY
            self._row_numbers[slots[free]] = row_numbers[free]
            lost = self._row_numbers[slots] != row_numbers  # slot taken before, or by another row just now
            row_numbers, slots = row_numbers[lost], (slots[lost] + 1) & (len(self._row_numbers) - 1)

    def _first_slots(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        # The hash function of buckets: 16 bits, and 16 more by another table number.
        low = bucket_of(np.zeros(1, np.uint32), ids, 1 << 16).astype(np.int64)
        high = bucket_of(np.ones(1, np.uint32), ids, 1 << 16).astype(np.int64)
        return (low | high << 16) & (len(self._row_numbers) - 1)


class Table:
    """Rows of one table, by id."""

    def __init__(self, width: int, dtype: np.dtype[np.generic]) -> None:
        self._index = _IdIndex()
        self._rows = np.empty((len(self._index.ids), width), dtype)
        self._alive = np.zeros(len(self._index.ids), np.bool_)  # by row number
        self._num_removed = 0

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of all rows, in no particular order."""
        num_numbers = self._index.num_rows
        ids = self._index.ids[:num_numbers]
        return ids[self._alive[:num_numbers]] if self._num_removed else ids

    def read(self, ids: NDArray[np.int64]) -> tuple[Rows, NDArray[np.bool_]]:
        """Rows of ids in any order, with or without duplicates, zero where missing; and which were found."""
        numbers, found = self._find(ids)
        if found.all():
            return self._rows[numbers], found
        rows = np.zeros((len(ids), self._rows.shape[1]), self._rows.dtype)
        rows[found] = self._rows[numbers[found]]
        return rows, found

    def write(self, ids: NDArray[np.int64], rows: Rows) -> None:
        """Rows of distinct ids."""
        numbers = self._index.find(ids)
        new = numbers == _EMPTY
        numbers[new] = self._index.insert(ids[new])
        if len(self._index.ids) > len(self._rows):
            larger = np.empty((len(self._index.ids), self._rows.shape[1]), self._rows.dtype)
            larger[: len(self._rows)] = self._rows
            alive = np.zeros(len(larger), np.bool_)
            alive[: len(self._alive)] = self._alive
            self._rows, self._alive = larger, alive
        if self._num_removed:
            self._num_removed -= int(np.count_nonzero(~self._alive[numbers[~new]]))
        self._alive[numbers] = True
        self._rows[numbers] = rows

    def remove(self, ids: NDArray[np.int64]) -> None:
        """Remove the rows of ids in any order, with or without duplicates and ids without a row."""
        numbers, found = self._find(ids)
        gone = np.unique(numbers[found])
        self._alive[gone] = False
        self._num_removed += len(gone)
        if 2 * self._num_removed > self._index.num_rows:
            self._move()

    def _find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Row number of each id, and whether it has a row; the number is meaningless if not."""
        numbers = self._index.find(ids)
        found = numbers != _EMPTY
        if self._num_removed:
            found &= self._alive[numbers]
        return numbers, found

    def _move(self) -> None:
        """Move the rows to new arrays, which have no room for removed ones."""
        alive = self._alive[: self._index.num_rows]
        ids, rows = self.ids, self._rows[: len(alive)][alive]
        moved = Table(rows.shape[1], rows.dtype)
        moved.write(ids, rows)
        self._index, self._rows, self._alive, self._num_removed = moved._index, moved._rows, moved._alive, 0
