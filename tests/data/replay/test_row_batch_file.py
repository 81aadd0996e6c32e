from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from data.replay.row_batch_file import RowBatchFile


def test_batches_come_back_by_number_in_any_order_and_while_others_are_appended(tmp_path: Path) -> None:
    batches = [np.arange(count, dtype=np.int32) * 7 for count in (3, 0, 5, 1)]
    with RowBatchFile(tmp_path) as spool:
        for number, rows in enumerate(batches):
            spool.append(rows)
            assert spool[number].tolist() == rows.tolist()
        assert [spool[number].tolist() for number in (3, 0, 2, 1)] == [batches[n].tolist() for n in (3, 0, 2, 1)]
        assert (len(spool), spool.num_rows, spool[2].dtype.name) == (4, 9, "int32")
        for number in (-1, 4):
            with pytest.raises(IndexError, match=f"batch {number} of 4"):
                spool[number]


def test_its_files_are_in_the_folder_and_are_removed_after_an_error_too(tmp_path: Path) -> None:
    spool = RowBatchFile(tmp_path, "one")
    with contextlib.suppress(RuntimeError), spool:
        spool.append(np.arange(3, dtype=np.int32))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["one.ends", "one.rows"]
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["spool.rows", "spool.ends"])
def test_a_file_that_is_there_is_left_alone(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_bytes(b"mine")
    with pytest.raises(FileExistsError), RowBatchFile(tmp_path):
        pass
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(there, b"mine")]


def test_a_file_cut_short_is_noticed(tmp_path: Path) -> None:
    with RowBatchFile(tmp_path) as spool:
        spool.append(np.arange(3, dtype=np.int32))
        assert spool[0].shape == (3,)
        with (tmp_path / "spool.rows").open("r+b") as file:
            file.truncate(8)
        with pytest.raises(OSError, match="ends at 8 bytes"):
            spool[0]
