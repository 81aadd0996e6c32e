"""`WrittenRows`: which rows this process wrote lately, exactly. Pure numpy; 8 bytes a row, written once or often.

    add(table, ids) ──> unsorted, until somebody asks ──> sorted runs, the smaller merged with the next larger

A fetched row that is not found, but was written, is lost. That must be told from a row that is new, without error on
either side, so no filter would do; and it must stay small, so it reaches back only so far.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_ROWS", "WrittenRows"]

#: Rows remembered at most: 128 MiB.
MAX_ROWS = 1 << 24

#: Batches whose rows are kept unsorted.
_MAX_UNSORTED = 16

Ids = NDArray[np.int64]


class _IdSet:
    """Ids of one table."""

    def __init__(self) -> None:
        self._runs: list[Ids] = []  # sorted and distinct each, by falling size
        self._unsorted: list[Ids] = []
        self.num_rows = 0

    def add(self, ids: Ids) -> None:
        self._unsorted.append(ids)
        self.num_rows += len(ids)
        if len(self._unsorted) >= _MAX_UNSORTED:
            self.sort()

    def sort(self) -> None:
        """Count every row once."""
        if self._unsorted:
            self._runs.append(np.unique(np.concatenate(self._unsorted)))
            self._unsorted = []
            while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
                smaller = self._runs.pop()
                self._runs[-1] = np.union1d(self._runs[-1], smaller)
            self.num_rows = sum(map(len, self._runs))

    def contains(self, ids: Ids) -> NDArray[np.bool_]:
        self.sort()
        found = np.zeros(len(ids), dtype=np.bool_)
        for run in self._runs:
            positions = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            found |= run[positions] == ids
        return found


class WrittenRows:
    """Rows by table. One thread adds, another asks.

    Args:
        max_rows: remembered at most, at least half of them: when the newer half is full, the older one is forgotten.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_half = max_rows // 2
        self._newer: dict[int, _IdSet] = defaultdict(_IdSet)
        self._older: dict[int, _IdSet] = {}
        self._lock = threading.Lock()

    def add(self, table: int, ids: Ids) -> None:
        """These rows were written."""
        if not len(ids):
            return
        with self._lock:
            self._newer[table].add(ids)
            if self._num_newer > self._max_half:
                for rows in self._newer.values():
                    rows.sort()  # those written often count once by now
            if self._num_newer > self._max_half:
                self._older, self._newer = self._newer, defaultdict(_IdSet)

    @property
    def _num_newer(self) -> int:
        return sum(rows.num_rows for rows in self._newer.values())

    def contains(self, table: int, ids: Ids) -> NDArray[np.bool_]:
        """bool ``[len(ids)]``: the row was written, and is not forgotten."""
        found = np.zeros(len(ids), dtype=np.bool_)
        with self._lock:
            for half in (self._older, self._newer):
                if table in half:
                    found |= half[table].contains(ids)
        return found
