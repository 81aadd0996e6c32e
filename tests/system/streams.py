"""Batches of endless fresh ids, and store wrappers that fail or discard rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import StoreError
from bagpipe.store.interface import ReadResult, Rows, Store, StoreStatistics, WriteRequest
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema

__all__ = ["FailingStore", "ForgetfulStore", "fresh_batches"]


def fresh_batches(count: int, *, num_examples: int, num_features: int, num_dense: int = 0) -> Iterator[Batch]:
    """Batches of one id per bag; every id is new."""
    size = num_examples * num_features
    for index in range(count):
        # An odd multiplier is a bijection of 64-bit words.
        numbers = np.arange(index * size, (index + 1) * size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        yield Batch(
            index=index,
            dense=np.ones((num_examples, num_dense), np.float32),
            values=numbers.view(np.int64),
            lengths=np.ones((num_features, num_examples), np.int32),
            labels=(np.arange(num_examples) % 2).astype(np.float32),
        )


class _Wrapped:
    """A wrapper of an open store."""

    def __init__(self, store: Store) -> None:
        self.schema: RowSchema = store.schema
        self.inner = store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def check(self) -> bool:
        return self.inner.check()

    def claim(self) -> bool:
        return self.inner.claim()

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        return self.inner.read_many(requests)

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        self.inner.write_many(requests)

    def ids(self, table: int) -> NDArray[np.int64]:
        return self.inner.ids(table)

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        return self.inner.ids_by_table(tables)

    def statistics(self) -> StoreStatistics:
        return self.inner.statistics()


class FailingStore(_Wrapped):
    """A store that fails at the n-th exchange of a kind that carries rows, and at every later one."""

    def __init__(self, store: Store, *, at_write: int = 0, at_read: int = 0) -> None:
        super().__init__(store)
        self.writes = self.reads = 0
        self._at_write, self._at_read = at_write, at_read

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        self.reads += bool(requests)
        if requests and 0 < self._at_read <= self.reads:
            raise StoreError(f"read {self.reads} failed")
        return super().read_many(requests)

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        self.writes += bool(requests)
        if requests and 0 < self._at_write <= self.writes:
            raise StoreError(f"write {self.writes} failed")
        super().write_many(requests)


class ForgetfulStore(_Wrapped):
    """A store that acknowledges writes and keeps nothing, which excludes its memory from measurements."""

    rows_written = 0

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        self.rows_written += sum(len(request.ids) for request in requests)
