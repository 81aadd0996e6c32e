from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.memory.table import Table
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(tables=(RowTable(name="t", dim=1),), optimizer="sgd")
INT64 = st.integers(-(2**63), 2**63 - 1)


IDS = st.integers(-20, 20) | INT64
CHANGE = st.tuples(st.just("write"), st.dictionaries(IDS, st.integers(0, 100), max_size=30)) | st.tuples(
    st.just("delete"), st.sets(IDS, max_size=30)
)


@given(st.lists(CHANGE, max_size=12))
def test_it_behaves_like_a_dict(changes: list[tuple[str, dict[int, int] | set[int]]]) -> None:
    expected: dict[int, int] = {}
    num_deleted = 0
    with MemoryStore(SCHEMA) as store:
        for kind, change in changes:
            ids = np.array(list(change), np.int64)
            if isinstance(change, dict):
                assert kind == "write"
                replaced = store.read(0, ids).checks
                values = np.array(list(change.values()), np.float32)
                store.write_many([WriteRequest(0, ids, values[:, None], replaced)])
                expected |= change
            else:
                store.delete_many([DeleteRequest(0, ids)])
                num_deleted += len(expected.keys() & change)
                expected = {row_id: value for row_id, value in expected.items() if row_id not in change}
            assert store.ids(0).tolist() == sorted(expected)
            asked = [*expected, *change, 12345]
            result = store.read(0, np.array(asked, np.int64))
            assert result.found.tolist() == [row_id in expected for row_id in asked]
            assert result.rows.ravel().tolist() == [expected.get(row_id, 0) for row_id in asked]
            assert store.sum_changes().to_list() == stored_sums(store).to_list()
            assert store.statistics().rows_deleted == num_deleted


def test_room_of_deleted_rows_is_used_again() -> None:
    """A window of ids moves through many: the table stays as small as the window needs."""
    table, window = Table(1, np.dtype("<f4")), 2000
    for start in range(0, 60_000, 500):
        ids = np.arange(start, start + 500, dtype=np.int64)
        table.write(ids, ids.astype(np.float32)[:, None])
        table.remove(ids - window)
        assert len(table.ids) == min(start + 500, window)
    rows, found = table.read(np.sort(table.ids))
    assert found.all()
    assert (rows.ravel() == np.arange(58_000, 60_000)).all()
    assert len(table._rows) <= 4 * window


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
