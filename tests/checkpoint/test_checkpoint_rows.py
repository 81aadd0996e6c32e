from __future__ import annotations

import dataclasses
import itertools
import shutil
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint import merge
from bagpipe.checkpoint.adoption import adopt
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows, check_row_sums
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.journal import RowWriter
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.store.audit import stored_sums
from bagpipe.store.interface import WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.store.memory.store import MemoryStore
from bagpipe.store.validation import row_dtype
from bagpipe.testing.fence_jobs import new_token
from bagpipe.types.schema import RowSchema, RowTable
from tests.checkpoint.rows_of_jobs import RowsOfJob, no_warning
from tests.checkpoint.samples import (
    LINEAGE,
    SCHEMA,
    Model,
    content,
    draw_rows,
    empty_manifest,
    manifest_of,
    requests,
    rows_of,
    three_checkpoints,
)
from tests.effort import costly

#: The rows of the first three tables have 16 B in different words.
MIXED = RowSchema(
    tables=(
        RowTable(name="full", dim=4),
        RowTable(name="half", dim=8, dtype="float16"),
        RowTable(name="brain", dim=7, dtype="bfloat16"),
        RowTable(name="wide", dim=8),
    ),
    optimizer="sgd",
)


def random_bits(random: np.random.Generator, ids: np.ndarray, table: int) -> WriteRequest:
    """Rows of all bit patterns, not a number among them."""
    bits = random.integers(0, 256, (len(ids), MIXED.row_bytes(table)), np.uint8)
    return WriteRequest(table, ids, bits.view(row_dtype(MIXED, table)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    _, checkpoints, models = three_checkpoints(tmp_path_factory.mktemp("saved"))
    return list(zip(checkpoints, models, strict=True))


def test_reads_match_the_model(saved):
    random = np.random.default_rng(2)
    for checkpoint, model in saved:
        rows = rows_of(checkpoint)
        for table in range(len(SCHEMA.tables)):
            ids = random.permutation(np.arange(-60, 60))
            result = rows.read(table, ids)
            assert result.rows.shape == (120, SCHEMA.row_width(table))
            expected = [model.get((table, row_id), 0.0) for row_id in ids.tolist()]
            assert (result.rows == np.array(expected, np.float32)[:, None]).all()
            assert result.found.tolist() == [(table, row_id) in model for row_id in ids.tolist()]
            assert rows.contains(table, ids).tolist() == result.found.tolist()
            assert rows.ids(table).tolist() == sorted(row_id for at, row_id in model if at == table)
            assert [row_id for chunk in rows.rows(table) for row_id in chunk.ids.tolist()] == rows.ids(table).tolist()
            assert not len(rows.read(table, ids[:0]).rows)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1 << 20])
def test_all_rows_come_once_and_by_bucket(saved, monkeypatch, chunk_bytes):
    """In arrays of the caller's own, also a single row of a file."""
    monkeypatch.setattr(merge, "CHUNK_BYTES", chunk_bytes)
    for checkpoint, model in saved:
        rows = rows_of(checkpoint)
        assert content(rows) == model
        found = {}
        for buckets in ([0, 3], [1], [2]):
            for group in rows.requests(buckets=buckets, num_buckets=4):
                for request in group:
                    assert set(bucket_of(np.array([request.table], np.uint32), request.ids, 4).tolist()) <= set(buckets)
                    for row_id, row in zip(request.ids.tolist(), request.rows, strict=True):
                        assert (request.table, row_id) not in found
                        found[request.table, row_id] = float(row[0])
        assert found == model
        for request in itertools.chain.from_iterable(map(rows.rows, range(len(SCHEMA.tables)))):
            assert request.ids.flags.writeable
            assert request.rows.flags.writeable


@costly(6)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 3),
    full_every=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 200, 1 << 20]),
)
def test_a_deleted_row_is_in_no_reading(seed, ranks, full_every, chunk_bytes):
    """Rows are written, deleted by rank 0 and created anew by another rank, between checkpoints and over them."""
    random = np.random.default_rng(seed)
    with TemporaryDirectory() as path, ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(merge, "CHUNK_BYTES", chunk_bytes)
        name = uuid.uuid4().hex
        stores = [stack.enter_context(MemoryStore(SCHEMA, name=name, num_buckets=4)) for _ in range(ranks)]
        folder = CheckpointFolder(Path(path))
        job = RowsOfJob.start(stack, folder, stores, stores[0].ledger(), {}, full_every=full_every, keep=99)
        for _ in range(5):
            for _ in range(random.integers(1, 4)):
                job.train(draw_rows(random, 12))
                job.write_back(random.random(), random)
                if random.random() < 0.7:
                    job.delete({key for key in job.newest if random.random() < 0.4})
            job.publish(job.step, job.snapshot())
            checkpoint = folder.newest(no_warning)  # compares the sums
            check_readings(rows_of(checkpoint), job.newest)
            check_full_files(checkpoint, job)


def check_readings(rows: CheckpointRows, model: Model) -> None:
    """All readings agree with the rows that exist."""
    assert content(rows) == model
    every = np.arange(-45, 45)
    counts = np.zeros(4, np.int64)
    for table in range(len(SCHEMA.tables)):
        ids = sorted(row_id for at, row_id in model if at == table)
        result = rows.read(table, every)
        assert result.found.tolist() == rows.contains(table, every).tolist() == np.isin(every, ids).tolist()
        assert (result.rows[:, 0] == np.array([model.get((table, i), 0.0) for i in every.tolist()], np.float32)).all()
        assert not result.checks[~result.found].any()
        assert rows.ids(table).tolist() == ids
        assert [row_id for chunk in rows.rows(table) for row_id in chunk.ids.tolist()] == ids
        assert rows.extent(table) == (len(ids), *((ids[0], ids[-1]) if ids else (0, -1)))
        assert rows.num_records_of(table) >= len(ids)
        counts += np.bincount(bucket_of(np.array([table], np.uint32), np.array(ids, np.int64), 4), minlength=4)
    assert rows.count(4).tolist() == counts.tolist()
    with MemoryStore(SCHEMA, num_buckets=4) as store:
        store.write_many(requests(model))
        assert rows.sums(4).to_list() == stored_sums(store).to_list()


def check_full_files(checkpoint: Checkpoint, job: RowsOfJob) -> None:
    """Full files have the rows of their checkpoint, and no deletion up to it is in the base."""
    full = [file for file in checkpoint.manifest.base if file.full]
    records = [np.load(checkpoint.folder / file.file.name) for file in full]
    found = {
        (table, row_id): row[0]
        for table, row_id, row in (
            (record["table"].item(), record["id"].item(), record["row"].tolist()) for part in records for record in part
        )
    }
    for file in full:
        assert found == job.committed[f"{LINEAGE}:{job.token}:{file.step}"]
        assert all(other.full or other.step > file.step for other in checkpoint.manifest.base)


def test_dirty_rows_of_all_ranks(saved):
    tables, ids = rows_of(saved[0][0]).dirty()
    names = list(zip(tables.tolist(), ids.tolist(), strict=True))
    assert (tables.dtype, ids.dtype) == (np.uint32, np.int64)
    assert names == sorted(set(names))
    assert 2 < len(names) <= 4


def test_sums_are_those_of_a_store_with_the_rows(saved):
    for checkpoint, _ in saved:
        rows = rows_of(checkpoint)
        tables, ids = rows.dirty()
        with MemoryStore(SCHEMA, num_buckets=4) as all_rows, MemoryStore(SCHEMA, num_buckets=4) as dirty:
            for table in range(len(SCHEMA.tables)):
                for request in rows.rows(table):
                    all_rows.write_many([request])
                named = ids[tables == table]
                result = rows.read(table, named)
                dirty.write(table, named[result.found], result.rows[result.found])
            assert rows.sums(4).to_list() == stored_sums(all_rows).to_list()
            assert rows.dirty_sums(4).to_list() == stored_sums(dirty).to_list()


def test_the_sums_of_a_manifest_are_those_of_rows_that_are_not_dirty(saved):
    checkpoint = saved[-1][0]
    rows = rows_of(checkpoint)
    right = (rows.sums(4) - rows.dirty_sums(4)).to_list()
    check_row_sums(checkpoint.folder, dataclasses.replace(checkpoint.manifest, row_sums=tuple(right)))
    wrong = (right[0], right[1] + 1, *right[2:])
    with pytest.raises(BrokenCheckpoint, match="rows of 1 of 4 buckets were trained from values other than the last"):
        check_row_sums(checkpoint.folder, dataclasses.replace(checkpoint.manifest, row_sums=wrong))
    check_row_sums(checkpoint.folder, checkpoint.manifest)  # not known


def test_an_empty_checkpoint_has_no_rows(tmp_path):
    rows = CheckpointRows(tmp_path, manifest_of(1, 0), SCHEMA)
    assert rows.num_records == 0
    assert content(rows) == {}
    assert not rows.contains(1, np.arange(3)).any()
    assert not rows.read(1, np.arange(3)).found.any()
    assert len(rows.ids(0)) == len(rows.dirty()[1]) == 0


def test_rows_stay_readable_after_the_folder_is_removed(tmp_path):
    _, checkpoints, models = three_checkpoints(tmp_path)
    rows = rows_of(checkpoints[-1])
    shutil.rmtree(tmp_path)
    assert content(rows) == models[-1]
    table, row_id = next(iter(models[-1]))
    assert rows.contains(table, np.array([row_id])).all()


@pytest.mark.parametrize("merged", [False, True])
def test_rows_of_several_dtypes_come_back_bit_for_bit(tmp_path, merged):
    """From journals, from full files, and from the rows of another job."""
    random = np.random.default_rng(1)
    writer = RowWriter(tmp_path, MIXED, rank=0, epoch=1)
    latest = {table: random_bits(random, np.arange(-5, 5), table) for table in range(4)}
    older = [random_bits(random, np.arange(-9, 3), table) for table in range(4)]
    writer.append(older, 1)
    writer.append(list(latest.values()), 2)
    files = writer.seal(tmp_path, 3)
    assert sorted(file.row_bytes for file in files) == [16, 32]
    if merged:
        files = merge.merge_files(tmp_path, files, MIXED, target=tmp_path, step=3)
    rows = CheckpointRows(tmp_path, manifest_of(1, 3, base=files), MIXED)
    (*restored,) = (request for group in rows.requests() for request in group)
    for table in range(4):
        newer, old = latest[table], older[table]
        assert rows.ids(table).tolist() == list(range(-9, 5))
        expected = old.rows[:4].tobytes() + newer.rows.tobytes()
        assert restored[table].rows.dtype == row_dtype(MIXED, table)
        assert restored[table].rows.tobytes() == expected
        assert rows.read(table, np.arange(-9, 5)).rows.tobytes() == expected
    with MemoryStore(MIXED, num_buckets=4) as store, store.ledger() as ledger:
        store.write_many(restored)
        folder, token = CheckpointFolder(tmp_path / "job"), new_token(1)
        manifest = empty_manifest(folder.new_generation(), token, schema=MIXED)
        adopted = rows_of(adopt(store, ledger, token=token, folder=folder, manifest=manifest, num_writers=1))
        for table, request in enumerate(restored):
            assert adopted.read(table, request.ids).rows.tobytes() == request.rows.tobytes()
