"""The folders of Hive's partitions as columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.formats import open_eval_source, open_source
from data.loader import LookaheadLoader
from data.partitions import Partitions
from data.string_hash import hash_strings
from data.testing import check_source, read_all

SCHEMA = """
label = "y"
dense = ["hour"]
sparse = ["user", "dt", { name = "part", column = "hour" }]
[tables.dt]
strings = "hash"
"""


def write(folder: Path, parts: dict[str, list[int]], **columns: Any) -> str:
    """A file for each folder, with these users."""
    for name, users in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        table = {"y": [user % 2 for user in users], "user": users, **columns}
        if "11-28" in name:
            pyarrow.feather.write_feather(pa.table(table), folder / name / "a.arrow", compression="uncompressed")
        else:
            pq.write_table(pa.table(table), folder / name / "000000_0", row_group_size=2)
    (folder.parent / "s.toml").write_text(SCHEMA)
    return str(folder)


def config(path: str, **changes: Any) -> DataConfig:
    schema = next(str(folder / "s.toml") for folder in Path(path).parents if (folder / "s.toml").exists())
    return DataConfig(**{"path": path, "format": "parquet", "schema": schema, "eval_fraction": 0.0, **changes})


PARTS = {
    "dt=2026-11-27/hour=10": [1, 2, 3],
    "dt=2026-11-27/hour=9": [4],
    "dt=__HIVE_DEFAULT_PARTITION__/hour=07": [5, 6],
    "dt=a%2Fb%20c/hour=-1": [7],
}


def test_partitions_are_columns_as_pyarrow_reads_them(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", PARTS)
    source = open_source(config(path))
    check_source(source, batch_size=2)
    (batch,) = read_all(LookaheadLoader(source, batch_size=100))
    rows = pyarrow.dataset.dataset(list(source.files), partitioning="hive", partition_base_dir=path).to_table()
    assert batch.dense[:, 0].tolist() == rows["hour"].to_pylist() == [9, 10, 10, 10, 7, 7, -1]
    users, days, hours = np.split(batch.values, [7, 7 + 5])
    assert users.tolist() == rows["user"].to_pylist() == [4, 1, 2, 3, 5, 6, 7]
    names = [name for name in rows["dt"].to_pylist() if name is not None]
    assert days.tolist() == hash_strings(pa.array(names)).tolist()
    assert batch.lengths[1].tolist() == [int(name is not None) for name in rows["dt"].to_pylist()]
    assert hours.tolist() == [9, 10, 10, 10, 7, 7, -1]


def test_one_partition_has_the_columns_of_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", {**PARTS, "dt=2026-11-28/hour=9": [8]})
    whole = config(path, eval_path=f"{path}/dt=2026-11-28", eval_fraction=0.0)
    found = open_eval_source(whole, open_source(whole))
    assert found is not None
    for source in (found, open_source(config(f"{path}/dt=2026-11-28/hour=9/a.arrow"))):
        (batch,) = read_all(LookaheadLoader(source, batch_size=100))
        assert batch.values.tolist() == [8, int(hash_strings(pa.array(["2026-11-28"]))[0]), 9]


def test_a_files_own_column_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", {"dt=x/hour=1": [1]}, hour=[5])
    (batch,) = read_all(LookaheadLoader(open_source(config(path)), batch_size=100))
    assert batch.dense.tolist() == [[5]]


def test_values_of_a_table_of_strings_are_strings(tmp_path: Path) -> None:
    """Also if all of them could be integers, and in an evaluation folder where only some are."""
    (tmp_path / "s.toml").write_text('label = "y"\nsparse = ["zip"]\n[tables.zip]\nstrings = "hash"\n')
    parts = {"train/zip=1": [1], "train/zip=02": [2], "eval/zip=2": [3], "eval/zip=x": [4]}
    parts["none/zip=__HIVE_DEFAULT_PARTITION__"] = [5]
    for name, users in parts.items():
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(pa.table({"y": [user % 2 for user in users]}), tmp_path / name / "a.parquet")
    whole = config(f"{tmp_path}/train", eval_path=f"{tmp_path}/eval")
    source = open_source(whole)
    evaluation = open_eval_source(whole, source)
    assert evaluation is not None
    for each, names in ((source, ["1", "02"]), (evaluation, ["2", "x"]), (open_source(config(f"{tmp_path}/none")), [])):
        (batch,) = read_all(LookaheadLoader(each, batch_size=100))
        assert batch.values.tolist() == hash_strings(pa.array(names, pa.string())).tolist()


def test_unsigned_values_are_ids_like_any_other(tmp_path: Path) -> None:
    """2^63 and more are the signed ids of the same bits, and 007 is 7; only nulls are empty bags, or 0."""
    (tmp_path / "s.toml").write_text('label = "y"\ndense = ["none"]\nsparse = ["shop", "none"]\n')
    null = "none=__HIVE_DEFAULT_PARTITION__"
    for value in ("007", 2**63, 2**64 - 1):
        (tmp_path / "a" / f"shop={value}" / null).mkdir(parents=True)
        pq.write_table(pa.table({"y": [0]}), tmp_path / "a" / f"shop={value}" / null / "a.parquet")
    (batch,) = read_all(LookaheadLoader(open_source(config(f"{tmp_path}/a")), batch_size=100))
    assert batch.values.tolist() == [7, -(2**63), -1]
    assert batch.lengths[1].tolist() == batch.dense[:, 0].tolist() == [0, 0, 0]


def test_what_cannot_be_a_column_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "clicks", {"dt=x/hour=1": [1], "dt=y/hour=z": [1]})
    with pytest.raises(InputError, match=r"hour=1/000000_0: column 'hour': expected numbers, got binary"):
        open_source(config(path))
    path = write(tmp_path / "mixed", {"dt=x/hour=1": [1], "": [1]})
    with pytest.raises(InputError, match=r"mixed/000000_0: column 'hour' is missing"):
        open_source(config(path)).segments()
    path = write(tmp_path / "twice", {"dt=x/hour=1/dt=y": [1]})
    message = "hour=1/dt=y: expected each key once in the names of its folders, got 'dt' twice"
    with pytest.raises(InputError, match=re.escape(message)):
        open_source(config(path))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["1", "-2", "007"], pa.int64()),
        ([str(2**63 - 1), str(-(2**63))], pa.int64()),
        ([str(2**63), str(2**64 - 1), "7"], pa.uint64()),
        ([str(2**63), "-1"], pa.binary()),
        ([str(2**64)], pa.binary()),
        (["__HIVE_DEFAULT_PARTITION__"], pa.int64()),
        (["1", "x"], pa.binary()),
        (["1", "__HIVE_DEFAULT_PARTITION__"], pa.int64()),
        (["1.5"], pa.binary()),
        ([""], pa.binary()),
    ],
)
def test_a_column_is_of_integers_if_all_its_values_are(values: list[str], kind: pa.DataType) -> None:
    assert Partitions.of([f"a/key={value}/file" for value in values]).types == (("key", kind),)
