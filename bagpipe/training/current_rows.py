"""`CurrentRows`: the rows as training has them, for evaluations while it rests. Nothing is written for them.

    an evaluation's first read   kept rows that were updated  ──> copied from their slots, all at once
                                 that were written and left   ──> read from the store, all at once
    every read                   rows that are kept           ──> the copies
                                 others                       ──> from their slots, or the store; and kept

An updated row is in the cache until it is written. So a copy is that of the row unless the row is dirty, or was written
since. One rank: with several, a row may be in the cache of another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.resident_rows import ResidentRows
from bagpipe.cache.row_cache import RowCache
from bagpipe.store.interface import DeleteRequest, ReadResult, Store, WriteRequest
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.types.schema import RowSchema

__all__ = ["KEPT_BYTES", "CurrentRows", "RowReader"]

#: Bytes of rows that are kept between evaluations.
KEPT_BYTES = 256 << 20


class RowReader(Protocol):
    """The reads of a `Store`."""

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        ...


class CurrentRows(LoopPart):
    """A part of the training whose writes and deletions make kept copies stale.

    Args:
        kept_bytes: about so many bytes of rows are kept; further rows are read each time.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._tables: dict[int, _KeptRows] = {}

    def start(self, run: LoopRun) -> None:
        self._tables = {}

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, b: int) -> None:
        self._forget(requests)

    def after_delete(self, requests: Sequence[DeleteRequest], epoch: int, b: int) -> None:
        self._forget(requests)

    def _forget(self, requests: Sequence[WriteRequest | DeleteRequest]) -> None:
        for request in requests:
            if request.table in self._tables:
                self._tables[request.table].forget(request.ids)

    @contextmanager
    def reading(self, cache: RowCache, store: Store) -> Iterator[RowReader]:
        """Inside, training rests, and one thread can read its rows.

        Args:
            cache: of the training.
            store: of the training; no row is on its way there.
        """
        yield _Reads(cache, store, self._tables, self._kept_bytes)
        for kept in self._tables.values():
            kept.settle()


class _Reads:
    """The reads of one evaluation."""

    def __init__(self, cache: RowCache, store: Store, tables: dict[int, _KeptRows], kept_bytes: int) -> None:
        self._schema = cache.schema
        self._dirty = cache.slots.dirty
        self._resident = ResidentRows(cache)
        self._store = store
        self._tables = tables
        self._free_bytes = kept_bytes - sum(kept.num_bytes for kept in tables.values())
        self._is_fresh = False

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        if not self._is_fresh:
            self._refresh()
            self._is_fresh = True
        results, missing = [], []
        for number, (table, ids) in enumerate(requests):
            result = self._tables[table].read(ids) if table in self._tables else None
            if result is None:
                missing.append(number)
                result = _empty_result(self._schema, table, len(ids))
            results.append(result)
        for number, result in zip(missing, self._find([requests[number] for number in missing]), strict=True):
            self._keep(*requests[number], result)
            results[number] = result
        return results

    def _refresh(self) -> None:
        """Make all kept rows current: those of slots and those of the store in one exchange each."""
        stale = []
        for table, kept in sorted(self._tables.items()):
            slots = self._resident.find(table, kept.ids)
            is_stale = ~kept.is_current
            is_stale[slots >= 0] |= self._dirty[slots[slots >= 0]]
            places = np.flatnonzero(is_stale)
            if len(places):
                stale.append((table, kept, places))
        results = self._find([(table, kept.ids[places]) for table, kept, places in stale])
        for (_, kept, places), result in zip(stale, results, strict=True):
            kept.rows[places], kept.found[places], kept.is_current[places] = result.rows, result.found, True

    def _find(self, requests: list[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """Rows of slots, and of the store; by ascending table."""
        slots = [self._resident.find(table, ids) for table, ids in requests]
        copies = self._resident.copies(
            [(table, ids[at >= 0], at[at >= 0]) for (table, ids), at in zip(requests, slots, strict=True)]
        )
        results = [_empty_result(self._schema, table, len(ids)) for table, ids in requests]
        elsewhere = []
        for (table, ids), at, result in zip(requests, slots, results, strict=True):
            if table in copies:
                result.rows[at >= 0], result.found[at >= 0] = copies[table], True
            places = np.flatnonzero(at < 0)
            if len(places):
                elsewhere.append((table, ids[places], result, places))
        answers = self._store.read_many([(table, ids) for table, ids, _, _ in elsewhere]) if elsewhere else []
        for (_, _, result, places), answer in zip(elsewhere, answers, strict=True):
            result.rows[places], result.found[places] = answer.rows, answer.found
        return results

    def _keep(self, table: int, ids: NDArray[np.int64], result: ReadResult) -> None:
        """Keep rows for the next evaluations while there is room."""
        num_bytes = result.rows.nbytes + result.found.nbytes + ids.nbytes
        if num_bytes <= self._free_bytes:
            self._free_bytes -= num_bytes
            self._tables.setdefault(table, _KeptRows(_empty_result(self._schema, table, 0))).add(ids, result)


class _KeptRows:
    """Rows of one table, as evaluations have read them.

    Args:
        empty: no rows of the table.

    Attributes:
        ids: int64 ``[n]``, ascending.
        rows, found: ``[n, row_width]``, bool ``[n]``: as in `ReadResult`.
        is_current: bool ``[n]``, the row was not written since.
    """

    def __init__(self, empty: ReadResult) -> None:
        self.ids = np.empty(0, dtype=np.int64)
        self.rows, self.found = empty.rows, empty.found
        self.is_current = np.empty(0, dtype=np.bool_)
        self._added: list[tuple[NDArray[np.int64], ReadResult]] = []

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + self.found.nbytes + self.ids.nbytes

    def read(self, ids: NDArray[np.int64]) -> ReadResult | None:
        """Rows, all of them kept and current; None: some are not."""
        at, is_kept = self._find(ids)
        if not is_kept.all():
            return None
        return ReadResult(rows=self.rows[at], found=self.found[at], checks=np.zeros(len(ids), dtype=np.uint64))

    def add(self, ids: NDArray[np.int64], result: ReadResult) -> None:
        """Keep rows, from `settle` on. Some may be kept already."""
        self._added.append((ids, result))

    def forget(self, ids: NDArray[np.int64]) -> None:
        """Rows were written."""
        at, is_kept = self._find(ids)
        self.is_current[at[is_kept]] = False

    def settle(self) -> None:
        """Sort the rows that were added in. All are current."""
        if not self._added:
            return
        added, self._added = self._added, []
        names = np.concatenate([self.ids, *(ids for ids, _ in added)])
        # An evaluation with a small cache reads a row more than once; it is the same each time.
        self.ids, first = np.unique(names, return_index=True)
        self.rows = np.concatenate([self.rows, *(result.rows for _, result in added)])[first]
        self.found = np.concatenate([self.found, *(result.found for _, result in added)])[first]
        self.is_current = np.ones(len(self.ids), dtype=np.bool_)

    def _find(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places of ids, and whether they are there."""
        if not len(self.ids):
            return np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.bool_)
        at = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1).astype(np.int64)
        return at, self.ids[at] == ids


def _empty_result(schema: RowSchema, table: int, num_rows: int) -> ReadResult:
    return ReadResult(
        rows=np.zeros((num_rows, schema.row_width(table)), dtype=schema.row_type_of(table).word),
        found=np.zeros(num_rows, dtype=np.bool_),
        checks=np.zeros(num_rows, dtype=np.uint64),  # of writes, which an evaluation does not do
    )
