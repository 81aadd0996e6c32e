"""`StoredRows`: the rows of an open store, read table by table as those of a checkpoint are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import LostRowError
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
        self._groups: Iterator[Mapping[int, NDArray[np.int64]]] = iter(())
        self._group: Mapping[int, NDArray[np.int64]] = {}

    @property
    def schema(self) -> RowSchema:
        return self._store.schema

    def num_records_of(self, table: int) -> int:
        """Rows of a table. Reads their ids."""
        return len(self.ids(table))

    def ids(self, table: int) -> NDArray[np.int64]:
        """All ids of a table that have a row, ascending. Asked for by table number, they are listed group by group."""
        if table not in self._group:
            self._group = next(self._groups, {})
        if table not in self._group:  # another order: list them from this table on
            self._groups = iter(self._store.ids_by_table(range(table, len(self.schema.tables))))
            self._group = next(self._groups)
        return self._group[table]

    def rows(self, table: int) -> Iterator[WriteRequest]:
        """All rows of a table, in ascending order of ids, in chunks of a few MiB.

        Raises:
            LostRowError: a row vanished meanwhile.
            StoreError: the store failed.
        """
        ids = self.ids(table)
        chunk = max(1, _CHUNK_BYTES // self.schema.row_bytes(table))
        for first in range(0, len(ids), chunk):
            part = ids[first : first + chunk]
            result = self._store.read(table, part)
            if not result.found.all():
                raise LostRowError(f"table {self.schema.tables[table].name} id {part[~result.found][0]} vanished")
            yield WriteRequest(table, part, result.rows)
