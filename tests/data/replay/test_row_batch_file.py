from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from data.replay.row_batch_file import RowBatchFile


def test_batches_come_back_by_number_in_any_order_and_while_others_are_appended(tmp_path: Path) -> None:
    batches = [np.arange(count, dtype=np.int32) * 7 for count in (3, 0, 5, 1)]
    with RowBatchFile(tmp_path) as file:
        for number, rows in enumerate(batches):
            file.append(rows)
            assert file[number].tolist() == rows.tolist()
        assert [file[number].tolist() for number in (3, 0, 2, 1)] == [batches[n].tolist() for n in (3, 0, 2, 1)]
        assert (len(file), file.num_rows, file[2].dtype.name) == (4, 9, "int32")
        for number in (-1, 4):
            with pytest.raises(IndexError, match=f"batch {number} of 4"):
                file[number]


def test_others_read_the_files_and_leave_them(tmp_path: Path) -> None:
    with RowBatchFile(tmp_path) as file:
        for count in (3, 0, 5):
            file.append(np.arange(count, dtype=np.int32))
        file.flush()
        with RowBatchFile(tmp_path, reads=True) as reader:
            assert (len(reader), reader.num_rows, reader[2].tolist()) == (3, 8, [0, 1, 2, 3, 4])
        assert file[0].tolist() == [0, 1, 2]


def test_its_files_are_in_the_folder_and_are_removed_after_an_error_too(tmp_path: Path) -> None:
    file = RowBatchFile(tmp_path, "one")
    with contextlib.suppress(RuntimeError), file:
        file.append(np.arange(3, dtype=np.int32))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["one.ends", "one.rows"]
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["row-batches.rows", "row-batches.ends"])
def test_a_file_that_is_there_is_left_alone(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"mine")
    with pytest.raises(FileExistsError), RowBatchFile(tmp_path):
        pass
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(there, b"mine")]


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    with RowBatchFile(tmp_path) as batches:
        batches.append(np.arange(3, dtype=np.int32))
        assert batches[0].shape == (3,)
        with (tmp_path / "row-batches.rows").open("r+b") as file:
            file.truncate(8)
        with pytest.raises(OSError, match="ends at 8 bytes"):
            batches[0]
