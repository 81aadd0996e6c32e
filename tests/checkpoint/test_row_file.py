from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.checkpoint.row_file import (
    NAME_DTYPE,
    RecordFile,
    file_dtype,
    latest_positions,
    load_names,
    map_records,
    record_dtype,
    save_names,
    words_as,
)
from bagpipe.types.schema import RowSchema, RowTable

DTYPE = record_dtype(12, "float32")


def test_the_format_never_changes():
    assert DTYPE.itemsize == 32
    assert [DTYPE.fields[name][1] for name in ("id", "table", "step", "row")] == [0, 8, 12, 16]
    assert record_dtype(16, "float64").itemsize == 32
    assert NAME_DTYPE.itemsize == 12


def test_tables_of_one_row_size_share_a_file():
    """In their own words if they agree, else in halves."""
    tables = (
        RowTable(name="full", dim=4),
        RowTable(name="half", dim=8, dtype="float16"),
        RowTable(name="brain", dim=4, dtype="bfloat16"),
        RowTable(name="wide", dim=8),
    )
    schema = RowSchema(tables=tables, optimizer="sgd")
    assert [schema.row_bytes(table) for table in range(4)] == [16, 16, 8, 32]
    assert file_dtype(schema, 16) == record_dtype(16, "float16")
    assert file_dtype(schema, 8) == record_dtype(8, "bfloat16")
    assert file_dtype(schema, 32) == record_dtype(32, "float32")


def test_rows_in_other_words_have_the_same_bytes():
    rows = np.random.default_rng(0).standard_normal((5, 6)).astype("<f4")
    halves = words_as(rows, np.dtype("<u2"))
    assert halves.shape == (5, 12)
    assert halves.tobytes() == rows.tobytes()
    records = np.zeros(5, record_dtype(24, "float16"))
    records["row"] = halves
    assert words_as(records["row"], rows.dtype).tobytes() == rows.tobytes()
    assert words_as(rows, rows.dtype) is rows


def records(count: int) -> np.ndarray:
    found = np.zeros(count, DTYPE)
    found["id"] = np.arange(count)
    found["row"] = np.arange(count)[:, None]
    return found


@pytest.mark.parametrize("count", [0, 1, 7])
def test_numpy_reads_the_file(tmp_path, count):
    with RecordFile(tmp_path / "x.npy", DTYPE) as file:
        for record in np.split(records(count), count or 1):
            file.write(record)
    assert file.num_records == count
    assert file.entry.num_bytes == (tmp_path / "x.npy").stat().st_size
    for found in (np.load(tmp_path / "x.npy", allow_pickle=False), map_records(tmp_path / "x.npy", DTYPE, count)):
        assert found.dtype == DTYPE
        assert found.tobytes() == records(count).tobytes()


def test_an_error_leaves_no_file(tmp_path):
    with pytest.raises(TypeError), RecordFile(tmp_path / "x.npy", DTYPE) as file:
        file.write(None)
    assert not list(tmp_path.iterdir())


def test_other_content_is_refused(tmp_path):
    path = tmp_path / "x.npy"
    with RecordFile(path, DTYPE) as file:
        file.write(records(3))
    for dtype, count in ((DTYPE, 2), (DTYPE, 4), (record_dtype(16, "float32"), 3), (record_dtype(8, "float64"), 3)):
        with pytest.raises(BrokenCheckpoint, match=r"x\.npy: expected"):
            map_records(path, dtype, count)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        map_records(path, DTYPE, 3)
    path.unlink()
    with pytest.raises(BrokenCheckpoint, match="cannot be read"):
        map_records(path, DTYPE, 3)


def test_names_read_back(tmp_path):
    tables, ids = np.array([3, 0], np.uint32), np.array([-1, 2**62], np.int64)
    names = load_names(tmp_path, save_names(tmp_path / "dirty.npy", tables, ids))
    assert names.tolist() == [(3, -1), (0, 2**62)]
    assert len(load_names(tmp_path, save_names(tmp_path / "none.npy", tables[:0], ids[:0]))) == 0


IDS = st.one_of(st.integers(-3, 3), st.sampled_from([-(2**63), 2**63 - 1, 2**40]))


@given(st.lists(st.tuples(st.integers(0, 2), IDS, st.integers(0, 3)), max_size=40))
def test_the_latest_record_of_each_row_is_found(names):
    """Both implementations: packed keys for ids that are close to each other, several keys otherwise."""
    tables, ids, steps = np.array(names, np.int64).reshape(-1, 3).T
    latest: dict[tuple[int, int], tuple[int, int]] = {}
    for place, (table, row_id, step) in enumerate(names):
        latest[table, row_id] = max(latest.get((table, row_id), (-1, -1)), (step, place))
    expected = [latest[key][1] for key in sorted(latest)]
    assert latest_positions(tables.astype(np.uint32), ids, steps.astype(np.uint32)).tolist() == expected
