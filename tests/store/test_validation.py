from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.validation import check_deletion, check_read, check_write, row_dtype
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=2),), optimizer="adagrad")
IDS = np.array([5, -1, 3], np.int64)
ROWS = np.zeros((3, 4), np.float32)


def test_good_requests_pass_unchanged() -> None:
    assert check_read(SCHEMA, 0, IDS) is IDS
    ids, rows = check_write(SCHEMA, WriteRequest(0, IDS, ROWS))
    assert ids is IDS
    assert rows is ROWS
    assert row_dtype(SCHEMA, 0).str == "<f4"


@pytest.mark.parametrize(
    ("table", "ids", "message"),
    [
        (1, IDS, r"table number must be in \[0, 1\), got 1"),
        (-1, IDS, "got -1"),
        (0, IDS.astype(np.uint64), r"must be int64 \[n\], got uint64 \[3\]"),
        (0, IDS[None], r"must be int64 \[n\], got int64 \[1, 3\]"),
    ],
)
def test_bad_ids(table: int, ids: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_read(SCHEMA, table, ids)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS[:2], r"must be float32 \[3, 4\], got float32 \[2, 4\]"),
        (ROWS[:, :2], r"got float32 \[3, 2\]"),
        (ROWS.astype(np.float64), "got float64"),
        (ROWS.astype(">f4"), "got >f4"),
    ],
)
def test_bad_rows(rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_write(SCHEMA, WriteRequest(0, IDS, rows))


@pytest.mark.parametrize("ids", [[1, 1, 2], [2, 7, 2]])
def test_an_id_that_appears_twice(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"id {max(ids, key=ids.count)} appears twice in a write to table 0"):
        check_write(SCHEMA, WriteRequest(0, np.array(ids, np.int64), ROWS))


def test_a_deletion_names_each_row_once() -> None:
    requests = [DeleteRequest(0, IDS), DeleteRequest(0, IDS + 10)]
    [(table, ids)] = check_deletion(SCHEMA, requests)
    assert (table, ids.tolist()) == (0, [5, -1, 3, 15, 9, 13])
    with pytest.raises(ValueError, match="id -1 appears twice in a deletion from table 0"):
        check_deletion(SCHEMA, [*requests, DeleteRequest(0, IDS[1:2])])
    with pytest.raises(ValueError, match=r"table number must be in \[0, 1\), got 1"):
        check_deletion(SCHEMA, [DeleteRequest(1, IDS)])
