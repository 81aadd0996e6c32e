"""`MemoryStore`: rows in numpy arrays of this process, for tests and for tables that fit. Nothing survives the process.

A name makes a store that can be opened again: ``memory://name`` in the same process finds the same rows, and the same
owner and logs. Rows and ledger: `bagpipe.store.memory.space`, `bagpipe.store.memory.ledger`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import FencedError, RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.keys import check_layout
from bagpipe.store.memory.ledger import MemoryLedger
from bagpipe.store.memory.space import Log, Table, open_space
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.store.validation import check_read, check_write, row_dtype
from bagpipe.types.schema import RowSchema

__all__ = ["MemoryStore"]


class MemoryStore:
    """A namespace of rows in this process's memory. See `bagpipe.store.interface.Store`.

    Args:
        schema: what the rows mean.
        name: stores of one name and namespace share their rows for the life of the process; empty: shared with none.
        namespace: as for other stores.
        num_buckets: recorded and compared as by other stores; what a ledger says is by bucket.
    """

    def __init__(self, schema: RowSchema, *, name: str = "", namespace: str = "bagpipe", num_buckets: int = 64) -> None:
        check_layout(namespace, num_buckets)
        self.schema = schema
        self._record = SchemaRecord(schema=schema, num_buckets=num_buckets)
        self._place = f"namespace {namespace!r} at memory://{name}"
        self._dtype = row_dtype(schema)
        self._is_open = False
        self._space = open_space(name, namespace)
        self._num_buckets = num_buckets
        self._fence: Fence | None = None
        self._num_groups = np.zeros(num_buckets, np.int64)
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

    def check(self, *, reloads: bool = False) -> bool:
        """See `Store.check`."""
        with self._space.lock:
            if self._space.record:
                self._record.compare(self._space.record, self._place)
            return bool(self._space.record)

    def claim(self, *, reloads: bool = False) -> bool:
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
            if self._fence is not None and any(len(ids) > 0 for _, ids, _ in checked):
                log = self._checked_log(self._fence)
                log.append(
                    np.concatenate([np.full(len(ids), table, np.uint32) for table, ids, _ in checked]),
                    np.concatenate([ids for _, ids, _ in checked]),
                )
                self._num_groups = log.num_groups.copy()
            for table, ids, rows in checked:
                self._table(table).write(ids, rows)
        self._rows_written += sum(len(ids) for _, ids, _ in checked)

    def fence(self, fence: Fence) -> None:
        """See `Store.fence`."""
        self._fence = fence
        self._num_groups = np.zeros(self._num_buckets, np.int64)

    def rotate(self) -> NDArray[np.int64]:
        """See `Store.rotate`. ValueError without a fence."""
        if self._fence is None:
            raise ValueError("a store without a fence has no logs to rotate")
        with self._space.lock:
            num_groups = self._checked_log(self._fence).num_groups.copy()
            self._fence = replace(self._fence, epoch=self._fence.epoch + 1)
            self._space.logs.setdefault(self._fence, Log(self._num_buckets))
        self._num_groups = np.zeros(self._num_buckets, np.int64)
        return num_groups

    def ledger(self) -> Ledger:
        """See `Store.ledger`."""
        token = self._fence.token if self._fence is not None else ""
        return MemoryLedger(self._space, num_buckets=self._num_buckets, place=self._place, token=token)

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        check_read(self.schema, table, np.empty(0, np.int64))
        with self._space.lock:
            return np.sort(self._table(table).ids)

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`."""
        return StoreStatistics(rows_read=self._rows_read, rows_found=self._rows_found, rows_written=self._rows_written)

    def _checked_log(self, fence: Fence) -> Log:
        """The writer's log. Call under the lock.

        Raises:
            FencedError, RolledBackError: see `Store.write_many`.
        """
        log = self._space.logs.get(fence)
        if self._space.owner and self._space.owner != fence.token:
            raise FencedError(f"{self._place} was taken over: its owner is {self._space.owner!r}")
        if log is None:
            raise RolledBackError(f"{self._place} has lost the log of writer {fence.writer}; rows may be lost")
        short = log.num_groups < self._num_groups
        if short.any():
            bucket = int(short.argmax())
            raise RolledBackError(
                f"{self._place} has forgotten writes: bucket {bucket} names {log.num_groups[bucket]} groups of writer "
                f"{fence.writer}, expected {self._num_groups[bucket]}"
            )
        return log

    def _table(self, table: int) -> Table:
        """The table's rows. Call under the lock.

        Raises:
            StoreError: the store is not open.
        """
        if not self._is_open:
            raise StoreError("the store is not open: use it in a with statement")
        tables = self._space.tables
        while len(tables) < len(self.schema.tables):
            tables.append(Table(self.schema.row_width(len(tables)), self._dtype))
        return tables[table]
