"""`WrittenRows`: which rows this process wrote lately, exactly. Pure numpy; 8 bytes a row.

    add(epoch, table, ids) ──> unsorted, until somebody asks ──> sorted runs, the smaller merged with the next larger
    forget(epoch): rows written by then are known otherwise: from a checkpoint

A fetched row that is not found, but was written, is lost. That must be told from a row that is new, without error on
either side, so no filter would do; and it must stay small, so it reaches back only so far.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_ROWS", "WrittenRows"]

#: Rows remembered where no checkpoint ever takes them over: 128 MiB. Beyond, the oldest epochs are forgotten.
MAX_ROWS = 1 << 24

#: Batches whose rows are kept unsorted.
_MAX_FRESH = 16

Ids = NDArray[np.int64]


class _IdSet:
    """Ids of one table and epoch."""

    def __init__(self) -> None:
        self._runs: list[Ids] = []  # sorted and distinct each, by falling size
        self._fresh: list[Ids] = []
        self.num_rows = 0

    def add(self, ids: Ids) -> None:
        self._fresh.append(ids)
        self.num_rows += len(ids)
        if len(self._fresh) >= _MAX_FRESH:
            self.sort()

    def sort(self) -> None:
        """Count every row once."""
        if self._fresh:
            self._runs.append(np.unique(np.concatenate(self._fresh)))
            self._fresh = []
            while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
                smaller = self._runs.pop()
                self._runs[-1] = np.union1d(self._runs[-1], smaller)
            self.num_rows = sum(map(len, self._runs))

    def contains(self, ids: Ids) -> NDArray[np.bool_]:
        self.sort()
        found = np.zeros(len(ids), dtype=np.bool_)
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            found |= run[places] == ids
        return found


class WrittenRows:
    """Rows by epoch and table. One thread adds, another asks."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self._epochs: dict[int, dict[int, _IdSet]] = {}
        self._num_rows = 0
        self._lock = threading.Lock()

    def add(self, epoch: int, table: int, ids: Ids) -> None:
        """These rows were written in this epoch; epochs do not decrease."""
        if not len(ids):
            return
        with self._lock:
            self._epochs.setdefault(epoch, defaultdict(_IdSet))[table].add(ids)
            self._num_rows += len(ids)
            if self._num_rows > self._max_rows:
                self._count()  # rows that were written often count once by now
            while self._num_rows > self._max_rows and len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
                self._count()

    def contains(self, table: int, ids: Ids) -> NDArray[np.bool_]:
        """bool ``[len(ids)]``: the row was written in an epoch that is not forgotten."""
        found = np.zeros(len(ids), dtype=np.bool_)
        with self._lock:
            for tables in self._epochs.values():
                if table in tables:
                    found |= tables[table].contains(ids)
        return found

    def forget(self, epoch: int) -> None:
        """Forget what was written up to and in this epoch."""
        with self._lock:
            self._epochs = {number: tables for number, tables in self._epochs.items() if number > epoch}
            self._count()

    def _count(self) -> None:
        self._num_rows = 0
        for tables in self._epochs.values():
            for ids in tables.values():
                ids.sort()
                self._num_rows += ids.num_rows
