"""`every_row`: reads every row of a store; `stored_sums` sums their check words in each bucket.

tables ──Store.ids_by_table──> ids, ascending ──read_many, chunk by chunk──> rows and check words
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import LostRowError
from bagpipe.store.interface import ReadResult, Store
from bagpipe.store.row_sums import RowSums

__all__ = ["CHUNK_ROWS", "TableRows", "every_row", "stored_sums"]

#: Rows read at a time: 16 MiB of 256-byte records.
CHUNK_ROWS = 65_536


class TableRows(NamedTuple):
    """Rows of one table.

    Attributes:
        table: number of the table.
        ids: int64 ``[n]``, ascending.
        result: their rows, all of them found.
    """

    table: int
    ids: NDArray[np.int64]
    result: ReadResult


def every_row(store: Store, tables: Sequence[int]) -> Iterator[TableRows]:
    """All rows of tables, table by table, by ascending id. Memory: ids as `Store.ids_by_table`, and one chunk of rows.

    Raises:
        LostRowError: a row vanished meanwhile.
        CorruptRowError: a row does not match its check word.
        StoreError: the store failed.
    """
    chunk: list[tuple[int, NDArray[np.int64]]] = []
    num_rows = 0
    for group in store.ids_by_table(tables):
        for table, ids in group.items():
            for first in range(0, len(ids), CHUNK_ROWS):
                part = ids[first : first + CHUNK_ROWS]
                if num_rows + len(part) > CHUNK_ROWS:
                    yield from _read(store, chunk)
                    chunk, num_rows = [], 0
                chunk.append((table, part))
                num_rows += len(part)
    yield from _read(store, chunk)


def _read(store: Store, chunk: Sequence[tuple[int, NDArray[np.int64]]]) -> Iterator[TableRows]:
    for (table, ids), result in zip(chunk, store.read_many(chunk), strict=True):
        if not result.found.all():
            lost = ids[~result.found]
            raise LostRowError(
                f"table {store.schema.tables[table].name} id {lost[0]} vanished while all rows were read "
                f"({len(lost)} such rows)"
            )
        yield TableRows(table, ids, result)


def stored_sums(store: Store) -> RowSums:
    """Sums of the check words of all rows of the namespace. Memory and errors: see `every_row`."""
    sums = RowSums(store.sum_changes().num_buckets)
    for table, ids, result in every_row(store, range(len(store.schema.tables))):
        sums.add_rows(np.array([table], np.uint32), ids, result.checks)
    return sums
