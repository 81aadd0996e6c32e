"""`StoredRows`: the rows of an open store, read table by table as those of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import Store, WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["StoredRows"]

#: Bytes of rows read at a time.
_CHUNK_BYTES = 8 << 20


class StoredRows:
    """Rows of a namespace. Nobody writes to it meanwhile.

    Args:
        store: open.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def schema(self) -> RowSchema:
        return self._store.schema

    def num_records_of(self, table: int) -> int:
        """Rows of a table. Reads their ids."""
        return len(self.ids(table))

    def ids(self, table: int) -> NDArray[np.int64]:
        """All ids of a table that have a row, ascending."""
        return self._store.ids(table)

    def rows(self, table: int) -> Iterator[WriteRequest]:
        """All rows of a table, in ascending order of ids, in chunks of a few MiB.

        Raises:
            StoreError: the store failed.
        """
        ids = self.ids(table)
        chunk = max(1, _CHUNK_BYTES // self.schema.row_bytes(table))
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            yield WriteRequest(table, part, self._store.read(table, part).rows)
