"""`stored_sums`: reads every row of a store and sums the check words in each bucket."""

from __future__ import annotations

import numpy as np

from bagpipe.store.interface import Store
from bagpipe.store.row_sums import RowSums

__all__ = ["CHUNK_ROWS", "stored_sums"]

#: Rows read at a time: 16 MiB of 256-byte records.
CHUNK_ROWS = 65_536


def stored_sums(store: Store) -> RowSums:
    """Sums of the check words of all rows of the namespace. Memory: 8 B per row of the largest table, and one chunk.

    Raises:
        CorruptRowError: a row does not match its check word.
        StoreError: the store failed.
    """
    sums = RowSums(store.sum_changes().num_buckets)
    for table in range(len(store.schema.tables)):
        ids = store.ids(table)
        for first in range(0, len(ids), CHUNK_ROWS):
            chunk = ids[first : first + CHUNK_ROWS]
            sums.add_rows(np.array([table], np.uint32), chunk, store.read(table, chunk).checks)
    return sums
