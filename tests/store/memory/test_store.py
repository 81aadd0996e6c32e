from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.memory.store import MemoryStore
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=1),), optimizer="sgd")
INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.lists(st.tuples(st.integers(-20, 20) | INT64, st.integers(0, 100)), max_size=30), max_size=8))
def test_it_behaves_like_a_dict(batches: list[list[tuple[int, int]]]) -> None:
    expected: dict[int, int] = {}
    with MemoryStore(SCHEMA) as store:
        for batch in batches:
            rows = dict(batch)
            values = np.array(list(rows.values()), np.float32)
            store.write(0, np.array(list(rows), np.int64), values[:, None])
            expected |= rows
            assert store.ids(0).tolist() == sorted(expected)
            asked = [*expected, 12345]
            result = store.read(0, np.array(asked, np.int64))
            assert result.found.tolist() == [row_id in expected for row_id in asked]
            assert result.rows.ravel().tolist() == [expected.get(row_id, 0) for row_id in asked]


def test_it_grows_far_beyond_its_first_size() -> None:
    ids = np.random.default_rng(0).permutation(300_000).astype(np.int64) * 64
    with MemoryStore(SCHEMA) as store:
        for part in np.array_split(ids, 7):
            store.write(0, part, part.astype(np.float32)[:, None])
        result = store.read(0, ids)
        assert result.found.all()
        assert (result.rows.ravel() == ids.astype(np.float32)).all()
        assert not store.read(0, ids + 1).found.any()
        assert (store.ids(0) == np.sort(ids)).all()


def test_rows_handed_out_and_in_are_copies() -> None:
    ids = np.array([1], np.int64)
    rows = np.ones((1, 1), np.float32)
    with MemoryStore(SCHEMA) as store:
        store.write(0, ids, rows)
        rows[:] = 2
        read = store.read(0, ids).rows
        read[:] = 3
        assert store.read(0, ids).rows.tolist() == [[1]]
