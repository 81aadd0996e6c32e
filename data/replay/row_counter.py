"""`RowCounter`: numbers the distinct rows of a log in order of first use and counts the uses of each.

Batch ──index──> unique rows ──BoundedNumbers: an array by row | HashedNumbers: a hash map──> row numbers ─> baselines
                     └─uses of each─> counts by row number ──sorted table by table──> TableSkew

Counts are exact. Memory grows with the distinct rows (10 to 20 B each, plus 4 B for every row of a bounded table; 45 to
80 B each if ids are unbounded), never with the length of the log.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.handles import DenseHandles, HashHandles, dense_sizes
from bagpipe.oracle.index import Indexer
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.types.batch import Batch
from data.replay.records import TableSkew

__all__ = ["RowCounter"]

_Integer = TypeVar("_Integer", np.int16, np.int64)

#: Row numbers have 32 bits.
MAX_ROWS = (1 << 31) - 1
#: Most points of a skew curve.
CURVE_POINTS = 100


class _Numbers(Protocol):
    def of(self, rows: RowList) -> NDArray[np.int64]:
        """Numbers of distinct rows; new rows get the next numbers in their order."""
        ...


class BoundedNumbers:
    """Numbers of bounded tables: an array by row."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._handles = DenseHandles(sizes)
        self._number = np.full(self._handles.num_handles, -1, dtype=np.int32)
        self._num_rows = 0

    def of(self, rows: RowList) -> NDArray[np.int64]:
        """See `_Numbers`."""
        handles = self._handles.lookup_or_add(rows)
        numbers = self._number.take(handles)
        new = np.flatnonzero(numbers < 0)
        numbers[new] = np.arange(self._num_rows, self._num_rows + new.shape[0], dtype=np.int32)
        self._number[handles.take(new)] = numbers.take(new)
        self._num_rows += new.shape[0]
        return numbers.astype(np.int64)


class HashedNumbers:
    """Numbers of any 64-bit ids: handles of the oracle's hash map, never freed, so that they count the rows."""

    def __init__(self) -> None:
        self._handles = HashHandles(planned_bits=64)

    def of(self, rows: RowList) -> NDArray[np.int64]:
        """See `_Numbers`."""
        return self._handles.lookup_or_add(rows)


class RowCounter:
    """Counts the rows of a log, batch by batch.

    Args:
        spec: the log's tables and features; window and cache are ignored.

    Attributes:
        num_rows: distinct rows so far.
    """

    def __init__(self, spec: OracleSpec) -> None:
        self._spec = spec
        self._indexer = Indexer(spec)
        sizes = dense_sizes(spec.table_rows)
        self._numbers: _Numbers = HashedNumbers() if sizes is None else BoundedNumbers(sizes)
        self.num_rows = 0
        # By row number.
        self._uses = np.zeros(1024, dtype=np.int64)
        self._tables = np.zeros(1024, dtype=np.int16)
        # By table.
        self._bags = np.zeros(len(spec.table_rows), dtype=np.int64)
        self._empty_bags = np.zeros(len(spec.table_rows), dtype=np.int64)

    def take(self, batch: Batch) -> NDArray[np.int32]:
        """Count a batch and return int32 ``[U]``, the numbers of its distinct rows.

        Raises:
            InputError: an id outside its table, or more distinct rows than 32-bit numbers.
        """
        index = self._indexer.index(batch)
        numbers = self._number(index.unique)
        self._uses[numbers] += np.diff(index.offsets)
        empty = None if batch.is_one_hot else np.count_nonzero(batch.lengths == 0, axis=1)
        for ref in self._spec.features:
            self._bags[ref.table] += batch.num_examples
            self._empty_bags[ref.table] += 0 if empty is None else int(empty[ref.feature])
        return numbers.astype(np.int32)

    def rows_of(self, batch: Batch) -> NDArray[np.int32]:
        """As `take`, without counting: for the same log cut into other batches."""
        return self._number(self._indexer.index(batch).unique).astype(np.int32)

    def expired(self, batch: Batch) -> NDArray[np.int32]:
        """int32: the numbers of the rows that expire before a batch."""
        expired = self._indexer.expired(batch)
        return np.empty(0, dtype=np.int32) if expired is None else self._number(expired).astype(np.int32)

    def tables_of_rows(self) -> NDArray[np.int16]:
        """int16 by row number: the table of each row."""
        return self._tables[: self.num_rows]

    def rows_by_table(self) -> NDArray[np.int64]:
        """int64 by table: distinct rows."""
        return np.bincount(self.tables_of_rows(), minlength=len(self._spec.table_rows))

    def skew(self, names: tuple[str, ...]) -> tuple[TableSkew, ...]:
        """Skew of the accesses to each table.

        Args:
            names: of the tables.
        """
        tables = self.tables_of_rows()
        return tuple(
            _skew(
                name,
                np.sort(self._uses[: self.num_rows][tables == number])[::-1],
                missing=int(self._empty_bags[number]) / max(1, int(self._bags[number])),
            )
            for number, name in enumerate(names)
        )

    def _number(self, unique: RowList) -> NDArray[np.int64]:
        numbers = self._numbers.of(unique)
        known = self.num_rows
        self.num_rows = max(known, int(numbers.max(initial=-1)) + 1)
        if self.num_rows > MAX_ROWS:
            raise InputError(f"replay counts at most {MAX_ROWS} distinct rows, the log has more: use data.limit")
        if self.num_rows > self._uses.shape[0]:
            self._uses = _grown(self._uses, self.num_rows)
            self._tables = _grown(self._tables, self.num_rows)
        if self.num_rows > known:
            new = np.flatnonzero(numbers >= known)
            self._tables[numbers.take(new)] = np.searchsorted(unique.table_offsets, new, side="right") - 1
        return numbers


def _grown(array: NDArray[_Integer], needed: int) -> NDArray[_Integer]:
    new = np.zeros(max(needed, 2 * array.shape[0]), dtype=array.dtype)
    new[: array.shape[0]] = array
    return new


def _skew(name: str, uses: NDArray[np.int64], missing: float) -> TableSkew:
    """Of one table: the uses of its rows, most used first."""
    rows = uses.shape[0]
    sums = np.cumsum(uses)
    accesses = int(sums[-1]) if rows else 0

    def top(share: float) -> float:
        return float(sums[max(1, int(np.ceil(rows * share))) - 1]) / accesses if rows else 0.0

    ranks = np.unique(np.rint(np.geomspace(1, rows, CURVE_POINTS)).astype(np.int64)) if rows else sums
    return TableSkew(
        table=name,
        rows=rows,
        accesses=accesses,
        missing=missing,
        top_0_1=top(0.001),
        top_1=top(0.01),
        top_10=top(0.1),
        singletons=float(np.count_nonzero(uses == 1)) / rows if rows else 0.0,
        curve=tuple((rank / rows, float(sums[rank - 1]) / accesses) for rank in ranks.tolist()),
    )
