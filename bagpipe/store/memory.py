"""`MemoryStore`: rows in numpy arrays of this process, for tests and for tables that fit. Nothing survives the process.

    ids ──mix, linear probing, all ids at once──> row numbers ──> rows array (append only, doubles when full)

A name makes a store that can be opened again: ``memory://name`` in the same process finds the same rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.schema import RowSchema
from bagpipe.store.interface import ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.keys import bucket_of, check_layout
from bagpipe.store.record import SchemaRecord
from bagpipe.store.requests import check_read, check_write, row_dtype

__all__ = ["MemoryStore"]

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


class _Table:
    """Rows of one table."""

    def __init__(self, width: int, dtype: np.dtype[np.floating]) -> None:
        self.index = _IdIndex()
        self.rows = np.empty((len(self.index.ids), width), dtype)

    def read(self, ids: NDArray[np.int64]) -> ReadResult:
        numbers = self.index.find(ids)
        found = numbers != _EMPTY
        if found.all():
            return ReadResult(self.rows[numbers], found)
        rows = np.zeros((len(ids), self.rows.shape[1]), self.rows.dtype)
        rows[found] = self.rows[numbers[found]]
        return ReadResult(rows, found)

    def write(self, ids: NDArray[np.int64], rows: Rows) -> None:
        numbers = self.index.find(ids)
        new = numbers == _EMPTY
        numbers[new] = self.index.insert(ids[new])
        if len(self.index.ids) > len(self.rows):
            larger = np.empty((len(self.index.ids), self.rows.shape[1]), self.rows.dtype)
            larger[: len(self.rows)] = self.rows
            self.rows = larger
        self.rows[numbers] = rows


class _Space:
    """What a namespace holds: its schema record and its tables. The lock covers both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.record: dict[str, str] = {}
        self.tables: list[_Table] = []


_spaces: dict[tuple[str, str], _Space] = {}
_spaces_lock = threading.Lock()


class MemoryStore:
    """A namespace of rows in this process's memory. See `bagpipe.store.interface.Store`.

    Args:
        schema: what the rows mean.
        name: stores of one name and namespace share their rows for the life of the process; empty: shared with none.
        namespace: as for other stores.
        num_buckets: recorded and compared as by other stores; nothing else depends on it.
    """

    def __init__(self, schema: RowSchema, *, name: str = "", namespace: str = "bagpipe", num_buckets: int = 64) -> None:
        check_layout(namespace, num_buckets)
        self.schema = schema
        self._record = SchemaRecord(schema=schema, num_buckets=num_buckets)
        self._place = f"namespace {namespace!r} at memory://{name}"
        self._dtype = row_dtype(schema)
        self._is_open = False
        self._space = _Space()
        if name:
            with _spaces_lock:
                self._space = _spaces.setdefault((name, namespace), self._space)
        self._rows_read = self._rows_found = self._rows_written = 0

    def __enter__(self) -> Self:
        if self._is_open:
            raise RuntimeError("the store is already open")
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False

    def check(self) -> bool:
        """See `Store.check`."""
        with self._space.lock:
            if self._space.record:
                self._record.compare(self._space.record, self._place)
            return bool(self._space.record)

    def claim(self) -> bool:
        """See `Store.claim`."""
        with self._space.lock:
            if self._space.record:
                self._record.compare(self._space.record, self._place)
                return False
            self._space.record = self._record.to_fields()
            return True

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store.read`."""
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        checked = [(table, check_read(self.schema, table, ids)) for table, ids in requests]
        with self._space.lock:
            results = [self._table(table).read(ids) for table, ids in checked]
        self._rows_read += sum(len(result.found) for result in results)
        self._rows_found += sum(int(np.count_nonzero(result.found)) for result in results)
        return results

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """See `Store.write`."""
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`."""
        checked = [(request.table, *check_write(self.schema, request)) for request in requests]
        with self._space.lock:
            for table, ids, rows in checked:
                self._table(table).write(ids, rows)
        self._rows_written += sum(len(ids) for _, ids, _ in checked)

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        check_read(self.schema, table, np.empty(0, np.int64))
        with self._space.lock:
            index = self._table(table).index
            return np.sort(index.ids[: index.num_rows])

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`."""
        return StoreStatistics(rows_read=self._rows_read, rows_found=self._rows_found, rows_written=self._rows_written)

    def _table(self, table: int) -> _Table:
        """The table's rows. Call under the lock.

        Raises:
            StoreError: the store is not open.
        """
        if not self._is_open:
            raise StoreError("the store is not open: use it in a with statement")
        tables = self._space.tables
        while len(tables) < len(self.schema.tables):
            tables.append(_Table(self.schema.row_width(len(tables)), self._dtype))
        return tables[table]
