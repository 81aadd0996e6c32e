"""`SettingBackStore`: another program sets one row of a store back to an earlier value, right after a chosen write."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import ReadResult, Store, WriteRequest
from bagpipe.testing.slow_store import SlowStore

__all__ = ["Call", "SetBack", "SettingBackStore", "chances"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One exchange of a job with its store: the rows, as (table, id)."""

    kind: Literal["read", "write"]
    rows: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBack:
    """A row that is set back, and the time of it.

    Attributes:
        row: table and id.
        write: number of the write after which it happens, among the job's writes.
        next_read: number of the read that fetches the row next, among the job's reads; None: no read does.
    """

    row: tuple[int, int]
    write: int
    next_read: int | None


def chances(calls: Sequence[Call]) -> list[SetBack]:
    """All writes of rows that were written before, in a job with these exchanges.

    Reads and writes come from two threads, but those of one row are ordered.
    """
    found: list[SetBack] = []
    written: set[tuple[int, int]] = set()
    count = Counter[str]()
    pending: dict[tuple[int, int], int] = {}  # positions in `found`
    for call in calls:
        for row in sorted(call.rows):
            if call.kind == "read" and row in pending:
                position = pending.pop(row)
                found[position] = replace(found[position], next_read=count["read"])
            elif call.kind == "write" and row in written:
                pending[row] = len(found)
                found.append(SetBack(row=row, write=count["write"], next_read=None))
            if call.kind == "write":
                written.add(row)
        count[call.kind] += 1
    return found


class SettingBackStore(SlowStore):
    """A job's store that notes its exchanges, and an unfenced store of the same namespace that sets a row back.

    Args:
        store: of the job.
        other: of the other program, not entered.
        set_back: what it does; None: nothing.

    Attributes:
        calls: the exchanges so far; those of evaluation are reads, too.
    """

    def __init__(
        self, store: Store, other: AbstractContextManager[Store] | None = None, set_back: SetBack | None = None
    ) -> None:
        super().__init__(store)
        self.calls: list[Call] = []
        self._other = other
        self._set_back = set_back
        self._is_trained = False
        self._lock = threading.Lock()

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`. Training has ended: the digest, which begins so, reads rows that no batch needs."""
        self._is_trained = True
        return super().ids_by_table(tables)

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        if not self._is_trained:
            self._note("read", requests)
        return super().read_many(requests)

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`. The row is set back before the call returns, so before anyone can read it."""
        number = self._note("write", [(request.table, request.ids) for request in requests])
        if self._set_back is None or self._set_back.write != number or self._other is None:
            super().write_many(requests)
            return
        table, row_id = self._set_back.row
        ids = np.array([row_id], np.int64)
        with self._other as other:
            earlier = other.read(table, ids)
            assert earlier.found.all(), "written before"
            super().write_many(requests)
            assert other.read(table, ids).checks != earlier.checks, "a step changes every row"
            other.write(table, ids, earlier.rows)

    def _note(self, kind: Literal["read", "write"], rows: Sequence[tuple[int, NDArray[np.int64]]]) -> int:
        named = frozenset((table, row_id) for table, ids in rows for row_id in ids.tolist())
        with self._lock:
            number = sum(call.kind == kind for call in self.calls)
            self.calls.append(Call(kind=kind, rows=named))
        return number
