"""Rows to score that the store does not have: the default row of their table, or zeros (`RowTable.absent`)."""

from __future__ import annotations

import numpy as np

from bagpipe.store.interface import ReadResult
from bagpipe.training.current_rows import RowReader
from bagpipe.types.schema import RowTable

__all__ = ["with_absent"]


def with_absent(table: RowTable, number: int, result: ReadResult, store: RowReader) -> ReadResult:
    """The result of a read in which every row is found. Unchanged if absent rows have their initial values.

    A default row that was never written leaves the rows absent: nothing was trained in place of them.

    Args:
        table: of the rows, with number `number`.
        number: in the schema of the store.
        result: of a read of the table.
        store: it is asked for the default row.
    """
    if table.absent == "initial" or result.found.all():
        return result
    rows = result.rows.copy()
    if table.default_id is None:
        rows[~result.found] = 0
    else:
        (default,) = store.read_many([(number, np.array([table.default_id], dtype=np.int64))])
        if not default.found[0]:
            return result
        rows[~result.found] = default.rows[0]
    return ReadResult(rows=rows, found=np.ones_like(result.found), checks=result.checks)
