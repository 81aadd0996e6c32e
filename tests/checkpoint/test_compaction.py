"""Checkpoints without some of their rows."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.checkpoint.compaction import KeptRows, compact, kept_rows, newest_at_rest
from bagpipe.checkpoint.dense_state import load
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.errors import InputError
from tests.checkpoint.samples import SCHEMA, Model, content, empty_manifest, files_of, rows_of, three_checkpoints
from tests.checkpoint.test_folder_lock import running


def is_kept(table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows of odd ids; all of the last table."""
    return (ids % 2 == 1) | (table == 2)


def summed(path: Path) -> tuple[CheckpointFolder, Checkpoint, Model]:
    """A folder whose newest checkpoint knows the sums of its rows in 4 buckets."""
    folder, checkpoints, models = three_checkpoints(path)
    newest = checkpoints[-1]
    rows = rows_of(newest)
    sums = (rows.sums(4) - rows.dirty_sums(4)).to_list()
    return folder, folder.publish(dataclasses.replace(newest.manifest, row_sums=tuple(sums))), models[-1]


def test_the_rows_that_stay_are_the_newest_checkpoint(tmp_path: Path) -> None:
    folder, before, model = summed(tmp_path)
    files = {path: path.read_bytes() for path in files_of(tmp_path)}
    assert newest_at_rest(folder) == before
    staying = {(table, one): value for (table, one), value in model.items() if one % 2 or table == 2}
    assert kept_rows(rows_of(before), is_kept) == [
        KeptRows(num_rows=sum(at == table for at, _ in model), num_kept=sum(at == table for at, _ in staying))
        for table in range(len(SCHEMA.tables))
    ]
    made = compact(folder, before, is_kept)
    assert made == CheckpointFolder(tmp_path).newest(pytest.fail)  # the sums are those of the rows
    assert made.position == (before.manifest.generation + 1, before.manifest.step)
    assert (made.manifest.checkpoint_id, made.manifest.row_sums != ()) == (before.manifest.checkpoint_id, True)
    assert content(rows_of(made)) == staying
    assert all(file.full for file in made.manifest.row_files)
    for old, new in zip(before.manifest.parts, made.manifest.parts, strict=True):
        assert (new.dense, new.progress, new.dirty) == (old.dense, old.progress, old.dirty)
        assert (made.folder / new.dense.name).samefile(before.folder / old.dense.name)
        load(made.folder, new.dense)
    assert {path: path.read_bytes() for path in files} == files
    # Another one leaves nothing.
    last = compact(folder, newest_at_rest(folder), lambda table, ids: np.zeros(len(ids), np.bool_))
    assert (content(rows_of(last)), folder.newest(pytest.fail)) == ({}, last)


def test_a_failure_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before, _ = summed(tmp_path)
    files = {path: path.read_bytes() for path in files_of(tmp_path)}

    def stop(num_rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(folder, before, is_kept, on_chunk=stop)
    monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "a file that a full disk lacks"))
    with pytest.raises(InputError, match=r"checkpoint\.dir .* cannot be written: No such file or directory"):
        compact(folder, before, is_kept)
    assert {path: path.read_bytes() for path in files_of(tmp_path)} == files


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    folder, before, _ = summed(tmp_path)
    with running(tmp_path) as (process, _):
        line = rf"in use by process {process.pid} on host .*: wait for that job's end or stop it"
        with pytest.raises(InputError, match=line):
            newest_at_rest(folder)
        with pytest.raises(InputError, match=line):
            compact(folder, before, is_kept)
    made = compact(folder, before, is_kept)
    with pytest.raises(InputError, match="a job has made a newer checkpoint meanwhile"):
        compact(folder, before, is_kept)
    assert folder.newest(pytest.fail) == made


def test_only_a_whole_newest_checkpoint_is_taken(tmp_path: Path) -> None:
    folder, before, _ = summed(tmp_path / "a")
    file = before.folder / before.manifest.parts[0].dense.name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"checkpoint of step 30 is the newest one and is broken: .* bytes, got"):
        newest_at_rest(folder)
    empty = CheckpointFolder(tmp_path / "b")
    with pytest.raises(InputError, match="has no checkpoint of trained rows"):
        newest_at_rest(empty)
    generation = empty.new_generation()
    empty.step_folder(generation, 0)
    empty.publish(empty_manifest(generation, f"{generation}-{'0' * 32}"))
    empty.release()
    with pytest.raises(InputError, match="has no checkpoint of trained rows"):
        newest_at_rest(empty)
