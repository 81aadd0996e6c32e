from __future__ import annotations

import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint import merge
from bagpipe.checkpoint.journal import RowWriter
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.types.schema import RowSchema, RowTable
from tests.checkpoint.samples import SCHEMA, deletions, requests, rows_of, three_checkpoints
from tests.effort import at_most

KEYS = st.tuples(st.integers(0, 2), st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1])))
VALUES = st.floats(0, 1, width=32)
ROWS = st.dictionaries(KEYS, VALUES, max_size=20)
#: By interval: rows of a full file or of two ranks. One rank at a time has a row, so the step orders its two versions.
#: Between them, deletions of rows by a third rank.
INTERVALS = st.lists(st.tuples(ROWS, st.just(set()) | st.sets(KEYS, max_size=20), ROWS), max_size=4)


@at_most(30)
@given(INTERVALS, st.sampled_from([1, 64, 200, 1 << 20]), st.integers(0, 3))
def test_merging_gives_the_latest_of_every_row(tmp_path_factory, intervals, chunk_bytes, full_after):
    folder = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK_BYTES", chunk_bytes)
        files, model = [], {}
        for number, (early, gone, late) in enumerate(intervals):
            # The later rows have the lower rank: neither rank order nor file order may decide.
            for rank, rows, keys, step in ((1, early, (), 10 * number + 1), (0, late, gone, 10 * number + 2)):
                writer = RowWriter(folder, SCHEMA, rank=rank, epoch=number)
                # A row can be written for the batch at which it expires, but not again before the next one.
                writer.delete(deletions(keys), step - 1)
                writer.append(requests(rows), step)
                files += writer.seal(folder, 10 * number + 10)
                model = {key: value for key, value in model.items() if key not in keys} | rows
            if number + 1 == full_after:
                files = list(merge.merge_files(folder, files, SCHEMA, target=folder, step=10 * number + 10))
                assert not any(file.is_deletions for file in files)
        opened = merge.open_files(folder, files, SCHEMA)
        for table in range(3):
            ids = [row_id for chunk in merge.merged_ids(opened[table], table) for row_id in chunk.tolist()]
            assert ids == sorted(row_id for at, row_id in model if at == table)
            chunks = list(merge.merged_records(opened[table], table))
            assert [row_id for chunk in chunks for row_id in chunk["id"].tolist()] == ids
            assert all(map(len, chunks))
        merged = merge.merge_files(folder, files, SCHEMA, target=folder, step=99)
        found = {}
        for file in merged:
            records = np.load(folder / file.file.name, allow_pickle=False)
            assert (file.full, len(records)) == (True, file.num_rows)
            keys = list(zip(records["table"].tolist(), records["id"].tolist(), strict=True))
            assert keys == sorted(set(keys))
            found |= dict(zip(keys, records["row"][:, 0].tolist(), strict=True))
        assert found == model
    shutil.rmtree(folder)


def test_aborting_leaves_no_file(tmp_path):
    _, checkpoints, _ = three_checkpoints(tmp_path / "dir")
    newest = checkpoints[-1]

    def give_up(num_rows: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        merge.merge_files(newest.folder, newest.manifest.row_files, SCHEMA, target=tmp_path, step=30, on_chunk=give_up)
    assert not list(tmp_path.glob("*.npy"))


def test_files_before_a_full_one_are_not_opened(tmp_path):
    _, checkpoints, models = three_checkpoints(tmp_path)
    newest = checkpoints[-1]
    files = checkpoints[0].manifest.row_files + newest.manifest.row_files  # the first ones are not in this folder
    opened = merge.open_files(newest.folder, files, SCHEMA)
    kinds = [[(file.source.full, file.source.is_deletions) for file in found] for found in opened.values()]
    assert kinds == [[(True, False), (False, False), (False, False), (False, True)]] * 3
    assert sum(len(ids) for table in range(3) for ids in merge.merged_ids(opened[table], table)) == len(models[-1])


def test_rows_of_no_table_are_refused(tmp_path):
    _, checkpoints, _ = three_checkpoints(tmp_path)
    folder, files = checkpoints[0].folder, checkpoints[0].manifest.row_files
    others = (SCHEMA.tables[0], RowTable(name="item", dim=5), SCHEMA.tables[2])
    other = RowSchema(tables=others, optimizer="rowwise_adagrad")
    with pytest.raises(BrokenCheckpoint, match="no table has rows of 20 bytes"):
        merge.open_files(folder, files, other)
    fewer = RowSchema(
        tables=(SCHEMA.tables[0], SCHEMA.tables[1], RowTable(name="shop", dim=5)), optimizer="rowwise_adagrad"
    )
    with pytest.raises(BrokenCheckpoint, match=r"expected rows of tables \[0\], got table 2"):
        merge.open_files(folder, files, fewer)
    assert rows_of(checkpoints[0]).num_records


def test_a_merge_holds_a_few_chunks(tmp_path, monkeypatch):
    """No chunk exceeds the requested size, for any distribution of ids over files."""
    random = np.random.default_rng(1)
    files = []
    for number, ids in enumerate((np.arange(900), np.arange(400, 600), random.integers(0, 5000, 800))):
        writer = RowWriter(tmp_path, SCHEMA, rank=0, epoch=number)
        writer.append(requests({(1, row_id): 1.0 for row_id in ids.tolist()}), number)
        files += writer.seal(tmp_path, number + 1)
    opened = merge.open_files(tmp_path, files, SCHEMA)[1]
    spans = list(merge._spans(opened, 1, 40 * 100))
    assert max(sum(len(span.records) for span in group) for group in spans) <= 100
    assert all(group for group in spans)
    assert len(spans) < 60


def test_a_width_without_rows_has_no_full_file(tmp_path):
    writer = RowWriter(tmp_path, SCHEMA, rank=0, epoch=1)
    writer.append(requests({(0, 1): 1.0, (1, 2): 2.0}), 4)
    writer.delete(deletions({(1, 2)}), 5)
    sealed = writer.seal(tmp_path, 6)
    assert [(file.row_bytes, file.num_rows) for file in sealed] == [(0, 1), (16, 1), (20, 1)]
    (full,) = merge.merge_files(tmp_path, sealed, SCHEMA, target=tmp_path, step=6)
    assert (full.row_bytes, full.num_rows) == (16, 1)
    assert {path.name for path in tmp_path.iterdir()} == {full.file.name, *(file.file.name for file in sealed)}
    assert merge.merge_files(tmp_path, sealed[:1], SCHEMA, target=tmp_path, step=6) == ()


def test_a_deletion_removes_records_up_to_its_own_and_no_later_one(tmp_path):
    """The deletion is in the file of one rank, the records in those of others; checkpoints at 10, 20 and 30."""
    files = []
    for checkpoint, rank, step, value in (
        (10, 1, 9, 1.0),
        (20, 1, 20, 2.0),  # of the snapshot, or of an eviction for the batch of the deletion
        (20, 2, 21, 3.0),  # of the row that came after
        (30, 2, 25, 4.0),
    ):
        writer = RowWriter(tmp_path, SCHEMA, rank=rank, epoch=step)
        writer.append(requests({(1, 5): value}), step)
        files += writer.seal(tmp_path, checkpoint)
    for rank, step in ((0, 20), (3, 19)):
        writer = RowWriter(tmp_path, SCHEMA, rank=rank, epoch=step)
        writer.delete(deletions({(1, 5)}), step)
        files += writer.seal(tmp_path, 20)
    values = []
    for number in range(5):
        opened = merge.open_files(tmp_path, [*files[:number], *files[4:]], SCHEMA)[1]
        values.append([chunk["row"][0, 0].item() for chunk in merge.merged_records(opened, 1)])
    assert values == [[], [], [], [3.0], [4.0]]
