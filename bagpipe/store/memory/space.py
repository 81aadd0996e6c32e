"""What `MemoryStore` keeps: rows in numpy arrays, logs of who wrote what. Nothing survives the process.

    ids ──mix, linear probing, all ids at once──> row numbers ──> rows array (append only, doubles when full)

Spaces of one name are one space, for as long as the process lives.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence
from bagpipe.store.interface import ReadResult, Rows
from bagpipe.store.keys import FIELD_DTYPE, bucket_of

__all__ = ["Log", "Space", "Table", "open_space"]

_EMPTY = -1
_SMALLEST_TABLE = 1024


class _IdIndex:
    """Open-addressing hash table from id to row number; every operation works on all ids at once."""

    def __init__(self) -> None:
        self._row_numbers = np.full(_SMALLEST_TABLE, _EMPTY, np.int64)
        self.ids = np.empty(_SMALLEST_TABLE // 2, np.int64)  # id of each row number
        self.num_rows = 0

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row number of each id, -1 where there is none."""
        result = np.full(len(ids), _EMPTY, np.int64)
        pending = np.arange(len(ids))
        place = self._home(ids)
        while len(pending):
            here = self._row_numbers[place]
            taken = here != _EMPTY
            match = taken & (self.ids[here] == ids[pending])
            result[pending[match]] = here[match]
            onward = taken & ~match
            pending, place = pending[onward], (place[onward] + 1) & (len(self._row_numbers) - 1)
        return result

    def insert(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give each of the ids, distinct and not there yet, the next row number."""
        first, self.num_rows = self.num_rows, self.num_rows + len(ids)
        if self.num_rows > len(self.ids):
            capacity = 1 << (self.num_rows - 1).bit_length()
            self.ids = np.concatenate([self.ids[:first], np.empty(capacity - first, np.int64)])
            # At most half full, so that runs of taken places stay short.
            self._row_numbers = np.full(2 * capacity, _EMPTY, np.int64)
            self._place(np.arange(first))
        row_numbers = np.arange(first, self.num_rows)
        self.ids[row_numbers] = ids
        self._place(row_numbers)
        return row_numbers

    def _place(self, row_numbers: NDArray[np.int64]) -> None:
        place = self._home(self.ids[row_numbers])
        while len(row_numbers):
            free = self._row_numbers[place] == _EMPTY
            self._row_numbers[place[free]] = row_numbers[free]
            lost = self._row_numbers[place] != row_numbers  # place taken before, or by another row just now
            row_numbers, place = row_numbers[lost], (place[lost] + 1) & (len(self._row_numbers) - 1)

    def _home(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        # The same mixing as for buckets: 16 bits and, for large tables, 16 more from another "table".
        low = bucket_of(np.zeros(1, np.uint32), ids, 1 << 16).astype(np.int64)
        high = bucket_of(np.ones(1, np.uint32), ids, 1 << 16).astype(np.int64)
        return (low | high << 16) & (len(self._row_numbers) - 1)


class Table:
    """Rows of one table, by id."""

    def __init__(self, width: int, dtype: np.dtype[np.generic]) -> None:
        self.index = _IdIndex()
        self.rows = np.empty((len(self.index.ids), width), dtype)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Of all its rows, in the order they were first written."""
        return self.index.ids[: self.index.num_rows]

    def read(self, ids: NDArray[np.int64]) -> ReadResult:
        """Rows of ids in any order, repeated or not."""
        numbers = self.index.find(ids)
        found = numbers != _EMPTY
        if found.all():
            return ReadResult(self.rows[numbers], found)
        rows = np.zeros((len(ids), self.rows.shape[1]), self.rows.dtype)
        rows[found] = self.rows[numbers[found]]
        return ReadResult(rows, found)

    def write(self, ids: NDArray[np.int64], rows: Rows) -> None:
        """Rows of distinct ids."""
        numbers = self.index.find(ids)
        new = numbers == _EMPTY
        numbers[new] = self.index.insert(ids[new])
        if len(self.index.ids) > len(self.rows):
            larger = np.empty((len(self.index.ids), self.rows.shape[1]), self.rows.dtype)
            larger[: len(self.rows)] = self.rows
            self.rows = larger
        self.rows[numbers] = rows

    def without(self, gone: NDArray[np.bool_]) -> Table:
        """A table of the other rows; `gone` as `ids`."""
        rest = Table(self.rows.shape[1], self.rows.dtype)
        if not gone.all():
            rest.write(self.ids[~gone], self.rows[: self.index.num_rows][~gone])
        return rest


class Log:
    """Rows that one writer wrote in one epoch.

    Attributes:
        fields: the rows of each write, as `FIELD_DTYPE`.
        num_groups: int64 ``[num_buckets]``: writes that touched the bucket.
    """

    def __init__(self, num_buckets: int) -> None:
        self.fields: list[NDArray[np.void]] = []
        self.num_groups = np.zeros(num_buckets, np.int64)

    def append(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """The rows of one write, each ``[n]``."""
        buckets = bucket_of(tables, ids, len(self.num_groups))
        self.num_groups += np.bincount(buckets, minlength=len(self.num_groups)) > 0
        fields = np.empty(len(ids), FIELD_DTYPE)
        fields["table"], fields["id"] = tables, ids
        self.fields.append(fields)


class Space:
    """What a namespace holds. Hold the lock for any use.

    Attributes:
        record: its schema record; empty: none.
        tables: by number; made as they are used.
        owner, checkpoint_id: of all buckets alike, for one lock covers them all.
        logs: by writer and epoch.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.record: dict[str, str] = {}
        self.tables: list[Table] = []
        self.owner = ""
        self.checkpoint_id = ""
        self.logs: dict[Fence, Log] = {}


_spaces: dict[tuple[str, str], Space] = {}
_spaces_lock = threading.Lock()


def open_space(name: str, namespace: str) -> Space:
    """The space of this name and namespace, made if new; without a name always a new one."""
    if not name:
        return Space()
    with _spaces_lock:
        return _spaces.setdefault((name, namespace), Space())
