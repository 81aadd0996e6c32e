from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bagpipe.config.data_format import with_format
from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.checked_read import read_checked
from data.cli import main
from data.columns import Columns
from data.formats import open_source
from data.hashing import hash_ids
from data.loader import LookaheadLoader
from data.mlperf import MlperfSource
from data.testing import assert_same_batches, check_source, read_all
from tests.data.documented import documented


def write(folder: Path, day: str = "day_0", rows: int = 5, seed: int = 0, **changes: Any) -> None:
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        "dense": rng.random((rows, 3), np.float32),
        "labels": rng.integers(0, 2, (rows, 1), np.int32),
        "sparse": {"0": rng.integers(0, 9, (rows, 1)), "1": rng.integers(0, 9, (rows, 3), np.int32)},
        **changes,
    }
    np.save(folder / f"{day}_dense.npy", arrays["dense"])
    np.save(folder / f"{day}_labels.npy", arrays["labels"])
    if isinstance(arrays["sparse"], dict):
        np.savez(folder / f"{day}_sparse_multi_hot.npz", **arrays["sparse"])
    else:
        np.save(folder / f"{day}_sparse.npy", arrays["sparse"])


def read(source: MlperfSource) -> list[Columns]:
    return [read_checked(source, block) for segment in source.segments() for block in source.blocks(segment)]


def test_arrays_become_columns(tmp_path: Path) -> None:
    write(
        tmp_path, rows=2, dense=np.array([[1, 2, 3], [4, 5, 6.5]]), labels=np.array([1, 0]),
        sparse={"1": np.array([[7, 8, 8], [9, 9, 9]]), "0": np.array([[1], [2]])},
    )  # fmt: skip
    source = MlperfSource.at(str(tmp_path))
    (columns,) = read(source)
    assert columns.labels.tolist() == [1, 0]
    assert columns.dense.tolist() == [[1, 2, 3], [4, 5, 6.5]]
    assert columns.values.tolist() == [1, 2, 7, 8, 8, 9, 9, 9]
    assert columns.lengths.tolist() == [[1, 1], [3, 3]]
    assert (source.multi_hot, source.schema.dense) == ({"C2"}, ("I1", "I2", "I3"))
    assert [array.dtype.str for array in (columns.labels, columns.values, columns.lengths)] == ["<f4", "<i8", "<i4"]


def test_features_beyond_the_tenth_keep_their_order(tmp_path: Path) -> None:
    sparse = {str(number): np.full((2, 1), number) for number in range(12)}
    write(tmp_path, rows=2, sparse=dict(sorted(sparse.items())))
    (columns,) = read(MlperfSource.at(str(tmp_path)))
    assert columns.values.tolist() == [number for number in range(12) for _ in range(2)]


def test_one_id_per_feature_in_one_array(tmp_path: Path) -> None:
    write(tmp_path, rows=2, sparse=np.array([[1, 2], [3, 4]], np.int32))
    source = MlperfSource.at(str(tmp_path / "day_0_labels.npy"))
    assert read(source)[0].values.tolist() == [1, 3, 2, 4]
    assert not source.multi_hot


def test_days_in_natural_order(tmp_path: Path) -> None:
    write(tmp_path, "day_10", rows=1, dense=np.full((1, 3), 10.0))
    write(tmp_path, "day_9", rows=1, dense=np.full((1, 3), 9.0))
    source = MlperfSource.at(str(tmp_path))
    assert [part.dense[0, 0] for part in read(source)] == [9, 10]
    assert len(source.files) == 6


def test_keeps_a_readers_promises(tmp_path: Path) -> None:
    write(tmp_path, rows=40)
    write(tmp_path, "day_1", rows=23, seed=1)
    labels = np.load(tmp_path / "day_1_labels.npy")
    labels[4] = 7
    np.save(tmp_path / "day_1_labels.npy", labels)
    check_source(MlperfSource.at(str(tmp_path), bad_rows="skip", block_rows=8))


def test_tables_can_be_hashed_or_bounded(tmp_path: Path) -> None:
    ids = np.array([[1], [11]])
    write(tmp_path, rows=2, sparse={"0": ids, "1": np.array([[1, 2], [3, 12]])})
    schema = tmp_path / "s.toml"
    schema.write_text("[tables.C1]\nrows = 10\nhash = true\n[tables.C2]\nrows = 10")
    config = DataConfig(format="mlperf-npz", path=str(tmp_path / "day_0_dense.npy"), schema=str(schema))
    message = r"day_0_dense\.npy: row 1 \(from 0\): expected ids of table 'C2' in \[0, 10\), got 12"
    with pytest.raises(InputError, match=message):
        read(open_source(config))  # type: ignore[arg-type]
    config = DataConfig(format="mlperf-npz", path=config.path, schema=config.schema, bad_rows="skip")
    (columns,) = read(open_source(config))  # type: ignore[arg-type]
    assert columns.values.tolist() == [hash_ids(ids[0], 10)[0], 1, 2]
    assert columns.bad_rows.tolist() == [1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dense": np.zeros((5, 3), np.int32)}, "day_0_dense.npy: expected floating-point numbers of shape [n, columns]"),
    ({"dense": np.zeros(5)}, "day_0_dense.npy: expected floating-point numbers of shape [n, columns], got float64 of"),
    ({"labels": np.zeros((5, 2))}, "day_0_labels.npy: expected one label a row, got shape [5, 2]"),
    ({"labels": np.zeros(4)}, "day_0_labels.npy: expected 5 rows as in "),
    (
        {"sparse": {"0": np.zeros((5, 2))}},
        "_multi_hot.npz: expected integers of shape [n, columns], got float64",
    ),
    ({"sparse": np.zeros(5, np.int32)}, "_sparse.npy: expected integers of shape [n, columns], got int32 of shape [5]"),
    ({"dense": np.full((5, 3), np.nan)}, "row 0 (from 0): expected finite dense values, got nan or infinity"),
    ({"labels": np.array([0, 1, 2, 0, 1])}, "row 2 (from 0): expected a label in [0, 1]"),
    ({"dense": np.zeros((0, 3)), "labels": np.zeros(0), "sparse": np.zeros((0, 2), int)}, "the file holds no rows"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_other_arrays_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read(MlperfSource.at(str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder holds no file ending in _dense\.npy"):
        MlperfSource.at(str(tmp_path))
    write(tmp_path)
    (tmp_path / "day_0_labels.npy").unlink()
    with pytest.raises(InputError, match=r"day_0_labels\.npy: no such file, which belongs to the other files of day_0"):
        MlperfSource.at(str(tmp_path))
    write(tmp_path)
    (tmp_path / "day_0_sparse_multi_hot.npz").unlink()
    with pytest.raises(InputError, match=r"day_0_sparse_multi_hot\.npz: no such file, nor one ending in _sparse\.npy"):
        MlperfSource.at(str(tmp_path))
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"x\.npy: expected a name ending in _dense\.npy, "):
        MlperfSource.at(str(tmp_path / "x.npy"))


def test_days_of_other_columns_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, "day_1", dense=np.zeros((5, 4)))
    with pytest.raises(InputError, match=r"day_1_dense\.npy: expected 3 dense and 2 sparse columns as on"):
        MlperfSource.at(str(tmp_path)).segments()


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = documented("MLPerf's arrays", "python")
    exec(compile(code, "docs/data-formats.md", "exec"), {})
    (schema,) = documented("MLPerf's arrays", "toml")
    Path("tables.toml").write_text(schema)
    (command,) = documented("MLPerf's arrays", "sh")
    assert main(command.splitlines()[0].split()[3:]) == 0
    data = DataConfig(path="days", schema="tables.toml")
    assert with_format(data).format == "mlperf-npz"
    batches = read_all(LookaheadLoader(open_source(data), batch_size=10))
    assert batches[0].num_examples == 4
    converted = open_source(DataConfig(format="parquet", path="days.arrow"))
    assert_same_batches(read_all(LookaheadLoader(converted, batch_size=10)), batches)
