"""`ArrayStore`: rows of bounded tables in arrays of this process, indexed by id. A step over it has no store time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.interface import DeleteRequest, ReadResult, WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.types.schema import RowSchema

__all__ = ["ArrayStore"]


class ArrayStore(MemoryStore):
    """A `MemoryStore` whose rows are arrays as long as their tables; pages never written take no memory.

    Args:
        schema: float32 rows of bounded tables.
    """

    def __init__(self, schema: RowSchema) -> None:
        super().__init__(schema)
        sizes = [table.rows or 0 for table in schema.tables]
        self._rows = [np.zeros((size, schema.row_width(table)), np.float32) for table, size in enumerate(sizes)]
        self._there = [np.zeros(size, np.bool_) for size in sizes]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        return [
            ReadResult(self._rows[table].take(ids, axis=0), self._there[table].take(ids), np.zeros(len(ids), np.uint64))
            for table, ids in requests
        ]

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        for request in requests:
            self._rows[request.table][request.ids] = request.rows
            self._there[request.table][request.ids] = True

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        for request in requests:
            self._rows[request.table][request.ids] = 0
            self._there[request.table][request.ids] = False
