"""`StoredRows` against what was written."""

from __future__ import annotations

import numpy as np

from bagpipe.checkpoint.stored_rows import StoredRows
from bagpipe.store.memory.store import MemoryStore
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="a", dim=4, rows=9), RowTable(name="b", dim=2)), optimizer="adagrad")


def test_rows_come_in_ascending_order_and_in_chunks() -> None:
    with MemoryStore(SCHEMA) as store:
        store.claim()
        ids = np.random.default_rng(0).permutation(600_000).astype(np.int64) - 5
        values = np.repeat(ids[:, None].astype(np.float32), SCHEMA.row_width(1), axis=1)
        store.write(1, ids, values)
        rows = StoredRows(store)
        assert rows.schema is SCHEMA
        assert rows.num_records_of(0) == 0
        assert list(rows.rows(0)) == []
        assert rows.num_records_of(1) == len(ids)
        found = list(rows.rows(1))
        assert len(found) > 1
        assert np.array_equal(np.concatenate([request.ids for request in found]), np.sort(ids))
        for request in found:
            assert request.table == 1
            assert (request.rows == request.ids[:, None]).all()
