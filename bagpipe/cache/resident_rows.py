"""`ResidentRows`: finds and copies the rows that a cache at rest holds, by table and id.

(table, ids) ──search in the sorted names of the slots──> slots ──RowCache.copy_rows──> records on the host

A slot with a row that does not exist yet is passed over: it was filled ahead of the batch that creates the row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_cache import RowCache
from bagpipe.oracle.plan import RowList
from bagpipe.store.interface import Rows

__all__ = ["ResidentRows"]


class ResidentRows:
    """An index of the rows in a cache that exist. Valid until a lane changes the cache. 12 B a row.

    Args:
        cache: at rest.
    """

    def __init__(self, cache: RowCache) -> None:
        self._cache = cache
        table, ids = cache.slots.slot_table, cache.slots.slot_id
        slots = cache.slots.existing_slots()
        # Two sorts of one key each: numpy sorts small integers by radix.
        slots = slots[np.argsort(ids[slots])]
        self._slots = slots[np.argsort(table[slots].astype(np.int16), kind="stable")]
        self._ids = ids[self._slots]
        self._offsets = np.searchsorted(table[self._slots], np.arange(len(cache.schema.tables) + 1))

    def find(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 ``[n]``, the slot of each row of a table; -1 for one that the cache does not have."""
        first, end = int(self._offsets[table]), int(self._offsets[table + 1])
        if first == end:
            return np.full(len(ids), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self._ids[first:end], ids), end - first - 1) + first
        return np.where(self._ids[places] == ids, self._slots[places], -1)

    def copies(self, requests: Sequence[tuple[int, NDArray[np.int64], NDArray[np.int64]]]) -> dict[int, Rows]:
        """Records ``[n, row_width]`` by table, of tables with n > 0.

        Args:
            requests: by ascending table: its number, ids and slots ``[n]``.
        """
        counts = np.zeros(len(self._cache.schema.tables) + 1, dtype=np.int64)
        for table, ids, _ in requests:
            counts[table + 1] = len(ids)
        if not counts.any():
            return {}
        rows = RowList(table_offsets=np.cumsum(counts), ids=np.concatenate([ids for _, ids, _ in requests]))
        slots = np.concatenate([slots for _, _, slots in requests])
        return {copied.table: copied.rows for copied in self._cache.copy_rows(rows, slots)}
