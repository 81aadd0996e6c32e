"""Strings, separators and buckets. Numbers, lists and weights: `test_parquet`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.errors import InputError
from data.arrow_columns import ArrowBlock, columns_of
from data.column_rules import ColumnRules
from data.columns import Columns
from data.hashing import hash_ids
from data.schema_file import parse_schema, read_schema_file
from data.string_dictionary import write_dictionary
from data.string_hash import hash_strings

SCHEMA = """
label = "y"
sparse = [
    "city",
    { name = "from", table = "city" },
    { name = "words", separator = " ", weight = "shares" },
    { name = "price", buckets = "log-squared" },
    { name = "numbers", separator = "," },
]
[tables.city]
rows = 1000
hash = true
strings = "hash"
string_seed = 3
[tables.words]
strings = "dictionary"
dictionary = "words.csv"
"""


def table(**changes: list[Any]) -> dict[str, Any]:
    columns = {
        "y": [1, 0, 1],
        "city": pa.array(["Rome", None, "Oslo"]).dictionary_encode(),
        "from": [["Oslo", "Rome"], [], None],
        "words": ["red hat", "", "blue red"],
        "shares": ["1 .5", None, "2 4"],
        "price": pa.array([1.5, None, 100.0]),
        "numbers": ["3,-17", None, "9223372036854775807"],
    }
    return columns | changes


def read(folder: Path, columns: dict[str, Any], bad_rows: str = "stop", **block: Any) -> Columns:
    path = folder / "s.toml"
    path.write_text(SCHEMA)
    write_dictionary(str(folder / "words.csv"), pa.array([b"hat", b"red"]), np.array([1, 2]), 0)
    rows = pa.table(columns)
    rules = ColumnRules.of("f", parse_schema(str(path), read_schema_file(str(path))), rows.schema)
    found = ArrowBlock(table=rows, **{"num_raw_rows": rows.num_rows, **block})
    return columns_of(rules, found, bad_rows=bad_rows, locate=lambda row: f"f:{row}")


def test_strings_separators_and_buckets(tmp_path: Path) -> None:
    columns = read(tmp_path, table())
    rome, oslo = hash_ids(hash_strings(pa.array(["Rome", "Oslo"]), 3), 1000).tolist()
    assert columns.lengths.tolist() == [[1, 0, 1], [2, 0, 0], [2, 0, 2], [1, 0, 1], [2, 0, 1]]
    assert columns.values.tolist() == [rome, oslo, oslo, rome, 2, 1, 0, 2, 1, 21, 3, -17, 2**63 - 1]
    assert columns.weights is not None
    assert columns.weights[4:8].tolist() == [1, 0.5, 2, 4]


BAD = [
    ({"numbers": ["3,x", None, "1"]}, "f:0: expected integer ids in column 'numbers', got 'x'"),
    ({"numbers": ["3", None, "1,"]}, "f:2: expected ids in column 'numbers', got nothing beside a ','"),
    ({"words": ["red  hat", None, "a b"]}, "f:0: expected ids in column 'words', got nothing beside a ' '"),
    ({"price": [1.0, float("inf"), 2.0]}, "f:1: expected a finite number in column 'price', got nan or infinity"),
    ({"from": [["Rome", None], [], []]}, "f:0: expected ids in column 'from', got a list with null"),
    ({"shares": ["1 2", None, "2 x"]}, "f:2: expected numbers in column 'shares', got a text"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path, table(**changes))
    columns = read(tmp_path, table(**changes), "skip")
    assert columns.bad_rows.tolist() == [int(message[2])]
    assert columns.lengths.sum() == columns.values.size


def test_rows_are_numbered_with_the_malformed_ones(tmp_path: Path) -> None:
    block = {"num_raw_rows": 6, "malformed": np.array([0, 2, 5])}
    columns = read(tmp_path, table(numbers=["1", "x", "2"]), "skip", **block)
    assert columns.bad_rows.tolist() == [0, 2, 3, 5]
    assert columns.num_raw_rows == 6
    # Rows 0, 1 and 2 of the table are those before a malformed row 3.
    block = {"num_raw_rows": 5, "malformed": np.array([3]), "problem": "expected another line"}
    with pytest.raises(InputError, match="f:3: expected another line"):
        read(tmp_path, table(), **block)
    with pytest.raises(InputError, match="f:1: expected integer ids"):
        read(tmp_path, table(numbers=["1", "x", "2"]), **block)
