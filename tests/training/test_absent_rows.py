"""Rows to score that were never created."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.training.absent_rows import with_absent
from bagpipe.types.schema import Absent, RowSchema, RowTable


def read(absent: Absent, *, has_default: bool) -> list[float]:
    """First weights of rows 1 (stored, of ones) and 2 (absent)."""
    schema = RowSchema(tables=(RowTable(name="t", dim=2, rows=9, absent=absent),), optimizer="sgd")
    with MemoryStore(schema) as store:
        ids = np.array([1, 8][: 1 + has_default], dtype=np.int64)
        store.write_many([WriteRequest(table=0, ids=ids, rows=np.array([[1, 1], [5, 5]], np.float32)[: len(ids)])])
        (result,) = store.read_many([(0, np.array([1, 2], dtype=np.int64))])
        completed = with_absent(schema.tables[0], 0, result, store)
        return [float(row[0]) for row in completed.rows[completed.found]]


@pytest.mark.parametrize(
    ("absent", "has_default", "expected"),
    [
        ("default", True, [1, 5]),
        ("default", False, [1]),  # nothing was trained in its place: the caller initialises the row
        ("zero", False, [1, 0]),
        ("initial", False, [1]),
    ],
)
def test_absent_rows(absent: Absent, has_default: bool, expected: list[float]) -> None:
    assert read(absent, has_default=has_default) == expected
