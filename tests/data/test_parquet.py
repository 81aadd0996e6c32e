from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.errors import InputError
from data.columnar_writer import write_columnar
from data.columns import Columns
from data.hashing import hash_ids
from data.parquet import ParquetSource
from data.testing import check_source

SCHEMA = """
label = "y"
dense = ["age"]
sparse = ["user", { name = "items", table = "item", weight = "items_w" }]
[tables.item]
rows = 10
"""


def write(folder: Path, columns: dict[str, Any], schema: str = SCHEMA, row_group_size: int = 3) -> tuple[str, str]:
    """A parquet file and its schema file."""
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=row_group_size)
    (folder / "a.toml").write_text(schema)
    return str(folder / "a.parquet"), str(folder / "a.toml")


def table(**changes: Any) -> dict[str, Any]:
    columns = {
        "y": pa.array([0, 1, 0, 1, 1], pa.int8()),
        "age": pa.array([1.5, None, 3.0, -4.0, 5.0], pa.float64()),
        "user": pa.array([7, None, -1, 2**62, 0], pa.int64()),
        "items": pa.array([[1, 2], [], None, [9], [0, 3, 3]], pa.list_(pa.int32())),
        "items_w": pa.array([[0.5, 1], [], None, [2], [3, 4, 5]], pa.list_(pa.float64())),
        "unused": pa.array(list("abcde")),
    }
    return columns | changes


def read(source: ParquetSource) -> list[Columns]:
    return [source.read(block) for segment in source.segments() for block in source.blocks(segment)]


def test_a_file_that_got_shorter_while_it_was_read_is_refused(tmp_path: Path) -> None:
    """Counted rows must not be missing from training."""
    path, schema = write(tmp_path, table(), row_group_size=5)
    source = ParquetSource.at(path, schema_path=schema)
    (block,) = source.blocks(*source.segments())
    write(tmp_path, {name: column[:3] for name, column in table().items()})
    with pytest.raises(InputError, match=r"row group 0: expected 5 rows, got 3: the file changed"):
        source.read(block)


def test_scalars_lists_nulls_and_weights(tmp_path: Path) -> None:
    path, schema = write(tmp_path, table(), row_group_size=5)
    (columns,) = read(ParquetSource.at(path, schema_path=schema))
    assert columns.labels.tolist() == [0, 1, 0, 1, 1]
    assert columns.dense.tolist() == [[1.5], [0.0], [3.0], [-4.0], [5.0]]
    assert columns.lengths.tolist() == [[1, 0, 1, 1, 1], [2, 0, 0, 1, 3]]
    assert columns.values.tolist() == [7, -1, 2**62, 0, 1, 2, 9, 0, 3, 3]
    assert columns.weights is not None
    assert columns.weights.tolist() == [1, 1, 1, 1, 0.5, 1, 2, 3, 4, 5]
    for array, kind in ((columns.values, "i8"), (columns.lengths, "i4"), (columns.dense, "f4"), (columns.labels, "f4")):
        assert array.dtype == np.dtype(kind)


@pytest.mark.parametrize("block_rows", [1, 2, 100])
def test_row_groups_and_blocks_lose_no_row(tmp_path: Path, block_rows: int) -> None:
    path, schema = write(tmp_path, table())
    parts = read(ParquetSource.at(path, schema_path=schema, block_rows=block_rows))
    assert np.concatenate([part.labels for part in parts]).tolist() == [0, 1, 0, 1, 1]
    assert sum(part.values.tolist().count(3) for part in parts) == 2


def test_unsigned_ids_wrap_and_hashed_ones_are_hashed(tmp_path: Path) -> None:
    ids = pa.array([2**64 - 1, 0, 1, 2, 3], pa.uint64())
    path, schema = write(tmp_path, table(user=ids), SCHEMA + "[tables.user]\nrows = 100\nhash = true")
    raw = np.array([-1, 0, 1], np.int64)
    assert read(ParquetSource.at(path, schema_path=schema))[0].values[:3].tolist() == hash_ids(raw, 100).tolist()


def test_a_folder_of_files(tmp_path: Path) -> None:
    for name in ("part-10.parquet", "part-9.parquet"):
        (tmp_path / name).write_bytes(Path(write(tmp_path, table(age=pa.array([float(name[5])] * 5)))[0]).read_bytes())
    (tmp_path / "a.parquet").unlink()
    parts = read(ParquetSource.at(str(tmp_path), schema_path=str(tmp_path / "a.toml")))
    assert [part.dense[0, 0] for part in parts] == [9, 9, 1, 1]


def test_keeps_a_readers_promises(tmp_path: Path) -> None:
    rows = 60
    rng = np.random.default_rng(0)
    columns = {
        "y": rng.integers(0, 2, rows),
        "age": rng.random(rows),
        "user": pa.array(rng.integers(0, 9, rows), mask=rng.random(rows) < 0.2),
        "items": pa.array([list(range(number % 4)) for number in range(rows)], pa.list_(pa.int64())),
        "items_w": pa.array([[0.5] * (number % 4) for number in range(rows)], pa.list_(pa.float32())),
    }
    columns["items"] = pa.array([[77] if n in (5, 17) else list(range(n % 4)) for n in range(rows)])  # out of range
    path, schema = write(tmp_path, columns, row_group_size=17)
    check_source(ParquetSource.at(path, schema_path=schema, block_rows=8, bad_rows="skip"))


BAD_ROWS = [
    ({"items": [[1, 2], [], None, [10], [0, 3, 3]]}, 3, "expected ids of table 'item' in [0, 10), got 10"),
    ({"items": [[1, 2], [], None, [9], [0, -3, 3]]}, 4, "expected ids of table 'item' in [0, 10), got -3"),
    ({"items": [[1, 2], [], None, [None], [0, 3, 3]]}, 3, "expected ids in column 'items', got a list with null"),
    ({"items_w": [[1.0], [], None, [2.0], [3.0] * 3]}, 0, "expected as many weights in 'items_w' as ids in 'items'"),
    ({"items_w": [[1.0, float("nan")], [], None, [2.0], [3.0] * 3]}, 0, "expected finite weights in column 'items_w'"),
    ({"y": pa.array([0, None, 1, 1, 1])}, 1, "expected a number in column 'y', got null"),
    ({"age": [0.0, 1.0, 1.0, 1.0, float("nan")]}, 4, "expected a finite number in column 'age', got nan or infinity"),
]


@pytest.mark.parametrize(("changes", "row", "message"), BAD_ROWS)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, changes: dict[str, Any], row: int, message: str) -> None:
    path, schema = write(tmp_path, table(**changes))
    with pytest.raises(InputError, match=re.escape(f"{path}: row {row} (from 0): {message}")):
        read(ParquetSource.at(path, schema_path=schema))
    parts = read(ParquetSource.at(path, schema_path=schema, bad_rows="skip"))
    assert [number for part, first in zip(parts, (0, 3), strict=True) for number in part.bad_rows + first] == [row]
    for part in parts:
        assert part.lengths.sum() == part.values.size
        assert part.lengths.shape[1] == part.num_rows == part.num_raw_rows - part.bad_rows.size
        assert part.weights is not None
        assert part.weights.size == part.values.size
        assert set(part.weights.tolist()) <= {0.5, 1, 2, 3, 4, 5}


BAD_COLUMNS = [
    ({"user": list("abcde")}, "column 'user': expected integer ids (or lists of them), got string"),
    ({"user": [1.0] * 5}, "column 'user': expected integer ids (or lists of them), got double"),
    ({"age": list("abcde")}, "column 'age': expected numbers, got string"),
    ({"items_w": [1.0] * 5}, "column 'items_w': expected floating-point weights shaped like the ids of 'items'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_COLUMNS)
def test_columns_of_unusable_types_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path, schema = write(tmp_path, table(**changes))
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        ParquetSource.at(path, schema_path=schema)


def test_missing_columns_and_schemas_are_refused(tmp_path: Path) -> None:
    columns = table()
    del columns["user"]
    path, schema = write(tmp_path, columns)
    with pytest.raises(InputError, match="column 'user' is missing, the file has: y, age, items"):
        ParquetSource.at(path, schema_path=schema)
    with pytest.raises(InputError, match=r"carries no schema of its own: name the columns with data\.schema"):
        ParquetSource.at(path)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    path, schema = write(tmp_path, {name: pa.array(column)[:0] for name, column in table().items()})
    with pytest.raises(InputError, match="holds no rows"):
        ParquetSource.at(path, schema_path=schema).segments()


HASHED = """
label = "y"
dense = ["age"]
sparse = ["unused", { name = "items", weight = "items_w" }]
[tables.unused]
strings = "hash"
[tables.items]
rows = 5
hash = true
"""


def test_a_converted_file_carries_its_own_schema(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside data.schema, which is that of its input, or another one for its columns."""
    path, schema = write(tmp_path, table(), HASHED)
    out = str(tmp_path / "out.arrow")
    write_columnar(ParquetSource.at(path, schema_path=schema), out)
    own = ParquetSource.at(out)
    said = rf"out\.arrow carries its own schema, .*; data\.schema {schema} is read in its place: leave it out"
    with pytest.raises(InputError, match=rf"column 'unused': expected strings, as table .*, got int64 \(.*{said}"):
        ParquetSource.at(out, schema_path=schema)
    assert not caplog.messages
    Path(schema).write_text('label = "y"\ndense = ["age"]\nsparse = ["unused", "items"]\n[tables.items]\nrows = 5\n')
    found = ParquetSource.at(out, schema_path=schema)
    assert re.search(said, caplog.text)
    assert found.rules.schema != own.rules.schema
    caplog.clear()
    weighted = '{ name = "items", weight = "items.weight" }'
    Path(schema).write_text(
        f'label = "y"\ndense = ["age"]\nsparse = ["unused", {weighted}]\n[tables.items]\nrows = 5\n'
    )
    assert ParquetSource.at(out, schema_path=schema).rules.schema == own.rules.schema
    assert not caplog.messages
