from __future__ import annotations

import numpy as np
import pytest

from bagpipe.store import audit
from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=1), RowTable(name="u", dim=2)), optimizer="sgd")


@pytest.mark.parametrize("chunk_rows", [7, 1 << 16])
def test_the_sums_of_a_store_are_those_of_all_writes(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    monkeypatch.setattr(audit, "CHUNK_ROWS", chunk_rows)
    ids = np.arange(40, dtype=np.int64)
    with MemoryStore(SCHEMA, num_buckets=4) as store:
        assert stored_sums(store).to_list() == [0] * 4
        new = np.zeros(40, np.uint64)
        store.write_many([WriteRequest(table, ids, np.ones((40, table + 1), np.float32), new) for table in (0, 1)])
        assert stored_sums(store).to_list() == store.sum_changes().to_list()
        assert all(store.sum_changes().to_list())
