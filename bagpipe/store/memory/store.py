"""`MemoryStore`: rows in numpy arrays of this process, for tests and for tables that fit. Nothing survives the process.

Stores of one name share a namespace: ``memory://name`` opened twice in a process finds the same rows, owner and logs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import RolledBackError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest, ReadResult, Rows, StoreStatistics, WriteRequest
from bagpipe.store.keys import FIELD_DTYPE, check_layout
from bagpipe.store.memory.ledger import MemoryLedger, MemoryNamespace
from bagpipe.store.memory.table import Table
from bagpipe.store.row_checksum import table_check_words
from bagpipe.store.row_sums import RowSums
from bagpipe.store.schema_record import SchemaRecord
from bagpipe.store.validation import check_deletion, check_read, check_write, row_dtype
from bagpipe.types.schema import RowSchema

__all__ = ["MemoryStore"]

_namespaces: dict[tuple[str, str], MemoryNamespace] = {}
_namespaces_lock = threading.Lock()


class MemoryStore:
    """A namespace of rows in this process's memory. See `bagpipe.store.interface.Store`.

    Args:
        schema: tables, row widths and dtypes.
        name: stores of one name and namespace share their rows until the process ends; empty: not shared.
        namespace: as in other stores.
        num_buckets: recorded and compared as in other stores; the ledger reports by bucket.
    """

    def __init__(self, schema: RowSchema, *, name: str = "", namespace: str = "bagpipe", num_buckets: int = 64) -> None:
        check_layout(namespace, num_buckets)
        self.schema = schema
        self._record = SchemaRecord(schema=schema, num_buckets=num_buckets)
        self._is_open = False
        self._namespace = _open_namespace(name, namespace, num_buckets)
        self._fence: Fence | None = None
        self._rows_read = self._rows_found = self._rows_written = self._rows_deleted = 0
        self._sum_changes = RowSums(num_buckets)

    def __enter__(self) -> Self:
        if self._is_open:
            raise RuntimeError("the store is already open")
        self._is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        with self._namespace.lock:
            if self._namespace.record and not resets:
                self._record.compare(self._namespace.record, self._namespace.label)
            return bool(self._namespace.record)

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`."""
        with self._namespace.lock:
            if self._namespace.record:
                self._record.compare(self._namespace.record, self._namespace.label)
                return False
            self._namespace.record = self._record.to_fields()
            return True

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store.read`."""
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        checked = [(table, check_read(self.schema, table, ids)) for table, ids in requests]
        with self._namespace.lock:
            found = [self._table(table).read(ids) for table, ids in checked]
        results = [
            ReadResult(rows, is_found, np.where(is_found, table_check_words(table, ids, rows), np.uint64(0)))
            for (table, ids), (rows, is_found) in zip(checked, found, strict=True)
        ]
        self._rows_read += sum(len(result.found) for result in results)
        self._rows_found += sum(int(np.count_nonzero(result.found)) for result in results)
        return results

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """See `Store.write`."""
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`."""
        checked = [(request.table, *check_write(self.schema, request)) for request in requests]
        with self._namespace.lock:
            self._log([(table, ids) for table, ids, _ in checked])
            for table, ids, rows in checked:
                self._table(table).write(ids, rows)
        self._rows_written += sum(len(ids) for _, ids, _ in checked)
        for request, (table, ids, rows) in zip(requests, checked, strict=True):
            if request.replaced is not None:
                words = table_check_words(table, ids, rows)
                self._sum_changes.replace_rows(np.array([table], np.uint32), ids, words, request.replaced)

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """See `Store.delete_many`."""
        checked = check_deletion(self.schema, requests)
        with self._namespace.lock:
            self._log(checked)
            for table, ids in checked:
                stored = self._table(table)
                rows, found = stored.read(ids)
                stored.remove(ids)
                words = table_check_words(table, ids, rows)[found]
                self._sum_changes.replace_rows(np.array([table], np.uint32), ids[found], np.zeros_like(words), words)
                self._rows_deleted += len(words)

    def fence(self, fence: Fence) -> None:
        """See `Store.fence`."""
        self._fence = fence

    def rotate(self) -> NDArray[np.int64]:
        """See `Store.rotate`. ValueError without a fence."""
        if self._fence is None:
            raise ValueError("a store without a fence has no logs to rotate")
        with self._namespace.lock:
            self._check_fence(self._fence)
            num_groups = np.array(self._namespace.num_groups(self._fence), np.int64)
            self._fence = replace(self._fence, epoch=self._fence.epoch + 1)
            self._namespace.logs.setdefault(self._fence, [])
        return num_groups

    def reset(self, token: str) -> None:
        """See `Store.reset`."""
        with MemoryLedger(self._namespace) as ledger:
            ledger.acquire(token)
            ledger.clear()
        with self._namespace.lock:
            self._namespace.num_buckets = self._record.num_buckets

    def ledger(self) -> Ledger:
        """See `Store.ledger`."""
        token = self._fence.token if self._fence is not None else ""
        return MemoryLedger(self._namespace, token=token)

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        check_read(self.schema, table, np.empty(0, np.int64))
        with self._namespace.lock:
            return np.sort(self._table(table).ids)

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`. Each table is a group."""
        for table in tables:
            yield {table: self.ids(table)}

    def sum_changes(self) -> RowSums:
        """See `Store.sum_changes`."""
        return self._sum_changes.copy()

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`."""
        return StoreStatistics(
            rows_read=self._rows_read,
            rows_found=self._rows_found,
            rows_written=self._rows_written,
            rows_deleted=self._rows_deleted,
        )

    def _log(self, changes: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Log the rows of one write or deletion, by table, if there is a fence and any row. Call under the lock.

        Raises:
            FencedError, RolledBackError: see `Store.fence`.
        """
        if self._fence is not None and any(len(ids) > 0 for _, ids in changes):
            self._check_fence(self._fence)
            self._namespace.logs[self._fence].append(np.concatenate([_fields(table, ids) for table, ids in changes]))

    def _check_fence(self, fence: Fence) -> None:
        """Call under the lock.

        Raises:
            FencedError, RolledBackError: see `Store.fence`.
        """
        if self._namespace.owner:
            self._namespace.check_owner(fence.token)
        if fence not in self._namespace.logs:
            raise RolledBackError(
                f"{self._namespace.label} has lost the log of writer {fence.writer}; rows may be lost"
            )

    def _table(self, table: int) -> Table:
        """The table's rows. Call under the lock.

        Raises:
            StoreError: the store is not open.
        """
        if not self._is_open:
            raise StoreError("the store is not open: use it in a with statement")
        tables = self._namespace.tables
        while len(tables) < len(self.schema.tables):
            tables.append(Table(self.schema.row_width(len(tables)), row_dtype(self.schema, len(tables))))
        return tables[table]


def _open_namespace(name: str, namespace: str, num_buckets: int) -> MemoryNamespace:
    """The namespace of these names, created if missing; always a new one if `name` is empty."""
    created = MemoryNamespace(f"namespace {namespace!r} at memory://{name}", num_buckets)
    if not name:
        return created
    with _namespaces_lock:
        return _namespaces.setdefault((name, namespace), created)


def _fields(table: int, ids: NDArray[np.int64]) -> NDArray[np.void]:
    fields = np.empty(len(ids), FIELD_DTYPE)
    fields["table"], fields["id"] = table, ids
    return fields
