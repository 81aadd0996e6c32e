"""`WrittenRows`: exact, bounded set of rows this process wrote recently. Pure numpy, 8 bytes per distinct row.

    add(table, ids) ──> unsorted until the next lookup ──> sorted runs, the smaller merged with the next larger

A fetched row that the store lacks is lost if it was written, and new otherwise. The distinction allows no false
positives or negatives, which rules out a Bloom filter. Memory is bounded, so only recent rows are remembered.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from bagpipe.util.distinct_ids import distinct_ids

__all__ = ["MAX_ROWS", "WrittenRows"]

#: Maximum number of remembered rows: 128 MiB.
MAX_ROWS = 1 << 24

#: Ids of a table kept unsorted, in any case; more of them while they are fewer than a quarter of those sorted.
_MIN_UNSORTED = 1 << 14

Ids = NDArray[np.int64]


class _IdSet:
    """Ids of one table."""

    def __init__(self) -> None:
        self._runs: list[Ids] = []  # each sorted and distinct; descending sizes
        self._unsorted: list[Ids] = []
        self._num_sorted = self.num_rows = 0

    def add(self, ids: Ids) -> None:
        self._unsorted.append(ids.copy())  # a view of a batch's ids would keep the whole batch in memory
        self.num_rows += len(ids)
        if self.num_rows - self._num_sorted > max(_MIN_UNSORTED, self._num_sorted // 4):
            self.sort()

    def sort(self) -> None:
        """Sort and deduplicate the new ids, so that `num_rows` counts each row once per run."""
        if self._unsorted:
            self._runs.append(distinct_ids(self._unsorted))
            self._unsorted = []
            while len(self._runs) > 1 and 2 * len(self._runs[-1]) > len(self._runs[-2]):
                smaller = self._runs.pop()
                self._runs[-1] = distinct_ids([self._runs[-1], smaller])
            self._num_sorted = self.num_rows = sum(map(len, self._runs))

    def contains(self, ids: Ids) -> NDArray[np.bool_]:
        self.sort()
        found = np.zeros(len(ids), dtype=np.bool_)
        for run in self._runs:
            positions = np.minimum(np.searchsorted(run, ids), len(run) - 1)
            found |= run[positions] == ids
        return found


class WrittenRows:
    """Recently written rows by table. One thread adds, another one looks up.

    Args:
        max_rows: upper bound; at least half as many are remembered. A full newer half replaces the older half.
    """

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_half = max_rows // 2
        self._newer: dict[int, _IdSet] = defaultdict(_IdSet)
        self._num_newer = 0  # rows of the newer half; those written several times count once or more
        self._older: dict[int, _IdSet] = {}
        self._lock = threading.Lock()

    def add(self, table: int, ids: Ids) -> None:
        """Add written rows."""
        if not len(ids):
            return
        with self._lock:
            self._newer[table].add(ids)
            self._num_newer += len(ids)
            if self._num_newer > self._max_half:
                for rows in self._newer.values():
                    rows.sort()  # deduplicates rows written several times
                self._num_newer = sum(rows.num_rows for rows in self._newer.values())
            if self._num_newer > self._max_half:
                self._older, self._newer, self._num_newer = self._newer, defaultdict(_IdSet), 0

    def contains(self, table: int, ids: Ids) -> NDArray[np.bool_]:
        """Whether each row is remembered as written, bool ``[len(ids)]``."""
        found = np.zeros(len(ids), dtype=np.bool_)
        with self._lock:
            for half in (self._older, self._newer):
                if table in half:
                    found |= half[table].contains(ids)
        return found
