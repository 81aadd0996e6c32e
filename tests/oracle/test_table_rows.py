"""Distinct rows of a batch by tables of the data."""

from __future__ import annotations

import numpy as np

from bagpipe.oracle.table_rows import TableRows
from tests.oracle.batches import make_batch


def test_rows_and_their_occurrences() -> None:
    """Features 0 and 2 read one table, feature 1 none of these."""
    batch = make_batch(0, [[[5, 3], []], [[7], [7]], [[3], [5, 5]]])
    found = TableRows.of(batch, [(0, 2), ()])
    assert found.rows.table_offsets.tolist() == [0, 2, 2]
    assert found.ids_of(0).tolist() == [3, 5]
    assert found.uses.tolist() == [2, 3]
    spans = [
        (table, batch.values[span].tolist(), of_ids.tolist())
        for table, span, of_ids in found.of_occurrences(np.array([30, 50]))
    ]
    assert spans == [(0, [5, 3], [50, 30]), (0, [3, 5, 5], [30, 50, 50])]


def test_no_tables() -> None:
    found = TableRows.of(make_batch(0, [[[1]]]), [])
    assert (len(found.rows), found.uses.shape) == (0, (0,))
