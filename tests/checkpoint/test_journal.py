from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint.files import check
from bagpipe.checkpoint.journal import RowWriter, save_dirty
from bagpipe.checkpoint.row_file import load_names
from tests.checkpoint.samples import SCHEMA, deletions, requests

KEYS = st.tuples(st.integers(0, 2), st.integers(-4, 4))
BATCHES = st.lists(st.tuples(st.integers(0, 9), st.dictionaries(KEYS, st.floats(0, 1, width=32))), max_size=8)


def test_journal_rows_are_sorted_and_unique(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")

    @given(BATCHES)
    def prop(batches):
        writer = RowWriter(folder, SCHEMA, rank=2, epoch=1)
        latest: dict[tuple[int, int], tuple[int, int, float]] = {}
        for number, (step, rows) in enumerate(batches):
            writer.append(requests(rows), step)
            for key, value in rows.items():
                latest[key] = max(latest.get(key, (-1, -1, 0.0)), (step, number, value))
        found = []
        for file in writer.seal(folder, 10):
            assert (file.full, file.step) == (False, 10)
            assert file.file.name == f"rows-00000010-0002-{file.row_bytes:06d}.npy"
            check(folder, file.file)
            records = np.load(folder / file.file.name, allow_pickle=False)
            assert file.num_rows == len(records)
            names = list(zip(records["table"].tolist(), records["id"].tolist(), strict=True))
            assert names == sorted(names)
            assert {SCHEMA.row_bytes(table) for table, _ in names} == {file.row_bytes}
            values = zip(names, records["step"].tolist(), records["row"].tolist(), strict=True)
            found += [(name, step, set(row)) for name, step, row in values]
        assert sorted(found) == sorted((key, step, {value}) for key, (step, _, value) in latest.items())
        assert not list(folder.glob("journal-*"))

    prop()


def test_deletions_are_names_with_their_latest_step(tmp_path):
    writer = RowWriter(tmp_path, SCHEMA, rank=2, epoch=1)
    writer.append(requests({(1, 3): 1.0}), 2)
    writer.delete(deletions({(2, 7), (1, 3)}), 3)
    writer.delete([], 4)
    writer.delete(deletions({(2, 7), (0, -1)}), 5)
    deleted, rows = writer.seal(tmp_path, 10)
    assert (deleted.is_deletions, deleted.full, deleted.step, deleted.num_rows) == (True, False, 10, 3)
    assert (rows.is_deletions, rows.num_rows) == (False, 1)
    assert deleted.file.name == "deleted-00000010-0002.npy"
    check(tmp_path, deleted.file)
    records = np.load(tmp_path / deleted.file.name, allow_pickle=False)
    assert records.dtype.names == ("id", "table", "step")
    assert records.tolist() == [(-1, 0, 5), (3, 1, 3), (7, 2, 5)]
    assert not list(tmp_path.glob("journal-*"))


def test_discarding_leaves_nothing(tmp_path):
    writer = RowWriter(tmp_path, SCHEMA, rank=0, epoch=1)
    writer.append(requests({(0, 1): 1.0, (1, 1): 1.0}), 4)
    writer.delete(deletions({(0, 1)}), 4)
    assert len(list(tmp_path.iterdir())) == 3
    writer.discard()
    writer.discard()
    assert not list(tmp_path.iterdir())
    assert writer.seal(tmp_path, 5) == ()


def test_steps_have_32_bits(tmp_path):
    with pytest.raises(ValueError, match="step must be in"):
        RowWriter(tmp_path, SCHEMA, rank=0, epoch=1).append([], 1 << 32)
    with pytest.raises(ValueError, match="step must be in"):
        RowWriter(tmp_path, SCHEMA, rank=0, epoch=1).delete([], -1)


def test_many_rows_are_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("bagpipe.checkpoint.journal._CHUNK_BYTES", 100)
    writer = RowWriter(tmp_path, SCHEMA, rank=0, epoch=1)
    writer.append(requests({(1, number): float(number) for number in reversed(range(100))}), 4)
    (file,) = writer.seal(tmp_path, 5)
    assert np.load(tmp_path / file.file.name)["row"][:, 0].tolist() == list(range(100))


def test_dirty_rows_are_names(tmp_path):
    entry = save_dirty(tmp_path, rank=3, tables=np.array([1], np.uint32), ids=np.array([9]))
    assert entry.name == "dirty-0003.npy"
    assert load_names(tmp_path, entry).tolist() == [(1, 9)]
