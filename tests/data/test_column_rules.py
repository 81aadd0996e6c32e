from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

from bagpipe.errors import InputError
from data.column_rules import ColumnRules
from data.schema_file import parse_schema, read_schema_file

SCHEMA = """
label = "y"
dense = ["age"]
sparse = [
    "user",
    { name = "tags", weight = "share" },
    { name = "words", separator = " " },
    { name = "age_bucket", column = "age", buckets = "log" },
]
[tables.user]
strings = "dictionary"
"""
TYPES = {
    "y": pa.bool_(),
    "age": pa.int32(),
    "user": pa.large_string(),
    "tags": pa.list_(pa.uint8()),
    "share": pa.list_(pa.float64()),
    "words": pa.string(),
    "more": pa.null(),
}


def rules(folder: Path, **changes: pa.DataType) -> ColumnRules:
    path = folder / "s.toml"
    path.write_text(SCHEMA)
    types = {name: kind for name, kind in (TYPES | changes).items() if kind is not None}
    return ColumnRules.of("a.file", parse_schema(str(path), read_schema_file(str(path))), pa.schema(types.items()))


def test_columns_of_all_kinds(tmp_path: Path) -> None:
    found = rules(tmp_path)
    assert found.names == ("y", "age", "user", "tags", "words", "share")
    assert found.multi_hot == {"tags", "words"}
    assert found.dictionaries == (str(tmp_path / "user.dictionary.csv"),)


BAD = [
    ({"age": None}, "a.file: column 'age' is missing, the file has: y, user, tags"),
    ({"y": pa.string()}, "a.file: column 'y': expected numbers, got string"),
    ({"age": pa.string()}, "a.file: column 'age': expected numbers, got string"),
    ({"user": pa.int64()}, "a.file: column 'user': expected strings, as table 'user' says, got int64"),
    ({"tags": pa.list_(pa.string())}, 'for ids from strings write strings = "hash" under [tables.tags]'),
    ({"tags": pa.list_(pa.float32())}, "expected integer ids (or lists of them), got list<item: float>: turn them"),
    ({"words": pa.int64()}, "a.file: column 'words': expected text with ' ' between ids, got int64"),
    ({"share": pa.float32()}, "a.file: column 'share': expected floating-point weights shaped like the ids of 'tags'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_other_types_are_refused(tmp_path: Path, changes: dict[str, pa.DataType], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        rules(tmp_path, **changes)


@pytest.mark.parametrize("name", ["y", "age", "user", "tags", "share", "words"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, name: str) -> None:
    """A column of any use; one that is not read can be there any number of times."""
    path = tmp_path / "s.toml"
    path.write_text(SCHEMA)
    parsed = parse_schema(str(path), read_schema_file(str(path)))
    columns = [*TYPES.items(), ("more", pa.int8())]
    ColumnRules.of("a.file", parsed, pa.schema(columns))
    message = f"a.file: column {name!r} is there 2 times, expected it once, the file has: y, age, user, tags, share"
    with pytest.raises(InputError, match=re.escape(message)):
        ColumnRules.of("a.file", parsed, pa.schema([*columns, (name, TYPES[name])]))
