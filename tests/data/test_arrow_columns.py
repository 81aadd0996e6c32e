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
    ({"shares": ["1 2", None, "2 x"]}, "f:2: expected numbers in column 'shares', got 'x'"),
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


#: Rows of each kind of column, with nulls, empty lists and nulls in lists.
WORDS = ["Rome", None, "", "Oslo", "Rome", None]
BAGS = [["Rome"], None, [], ["Oslo", None], ["", "Rome", "Rome"], [None]]
NUMBERS = [1, None, 0, 1, 1, None]
NUMBER_BAGS = [[1], None, [], [0, None], [3, 1, 1], [None]]
#: Of lists of fixed size.
PAIRS = [[1, 2], None, [3, None], [0, 1], [None, None], [4, 5]]

TEXTS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):  # with a null among its values too
        known = [None, "Rome", "", "Oslo"]
        places = pa.array(
            [
                known.index(value) if row % 2 else None if value is None else known.index(value)
                for row, value in enumerate(values)
            ],
            kind.index_type,
        )
        return pa.DictionaryArray.from_arrays(places, pa.array(known, kind.value_type))
    of_lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if of_lists and pa.types.is_dictionary(kind.value_type):
        flat = _array([value for row in values for value in row or ()], kind.value_type)
        bounds = np.cumsum([0, *(len(row or ()) for row in values)])
        mask = pa.array([row is None for row in values])
        return pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), flat, mask=mask)
    return pa.array(values, kind)


def _shapes(array: pa.Array) -> list[tuple[list[int], pa.ChunkedArray]]:
    """The array whole, sliced, and in chunks, each with the rows it holds."""
    rows = list(range(len(array)))
    return [
        (rows, pa.chunked_array([array])),
        (rows[1:5], pa.chunked_array([array.slice(1, 4)])),
        (rows[1:], pa.chunked_array([array.slice(1, 2), array.slice(3, 0), array.slice(3)])),
        ([], pa.chunked_array([array.slice(6)])),
    ]


def _same(schema: str, folder: Path, name: str, array: pa.Array, plain: pa.Array) -> None:
    """Compare what is read of a column with what is read of the same values in a plain one."""
    (folder / "s.toml").write_text(schema)
    parsed = parse_schema(str(folder / "s.toml"), read_schema_file(str(folder / "s.toml")))
    for rows, column in _shapes(array):
        found = []
        values = plain.take(pa.array(rows, pa.int64()))
        counts = [len(value) if isinstance(value, list) else int(value is not None) for value in values.to_pylist()]
        for each in (column, pa.chunked_array([values])):
            columns = {
                "y": pa.array([0.5] * len(rows), pa.float64()),
                "ids": pa.array([[7] * count for count in counts], pa.list_(pa.int64())),  # as many as weights
                name: each,
            }
            block = ArrowBlock(table=pa.table(columns), num_raw_rows=len(rows))
            rules = ColumnRules.of("f", parsed, block.table.schema)
            found.append(columns_of(rules, block, bad_rows="skip", locate=str))
        got, expected = found
        for item in ("labels", "dense", "values", "lengths", "weights", "bad_rows", "example_weights"):
            left, right = getattr(got, item), getattr(expected, item)
            assert (left is None) == (right is None)
            assert left is None or (left.dtype, left.tolist()) == (right.dtype, right.tolist()), (item, rows)


CODED = [pa.dictionary(pa.int8(), kind) for kind in (pa.string(), pa.large_binary(), pa.string_view())]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [*TEXTS, *CODED], ids=str)
@pytest.mark.parametrize("rule", ["hash", "dictionary", "separator"])
def test_texts_of_every_type_are_read_alike(tmp_path: Path, kind: pa.DataType, rule: str) -> None:
    """Nulls, alone and in lists, in slices and in chunks."""
    write_dictionary(str(tmp_path / "a.dictionary.csv"), pa.array([b"Oslo", b"Rome"]), np.array([1, 2]), 0)
    if rule == "separator":
        schema = 'label = "y"\nsparse = [{ name = "a", separator = "o" }]\n[tables.a]\nstrings = "hash"\n'
        _same(schema, tmp_path, "a", _array(WORDS, kind), pa.array(WORDS, pa.string()))
        return
    schema = f'label = "y"\nsparse = ["a"]\n[tables.a]\nstrings = "{rule}"\n'
    _same(schema, tmp_path, "a", _array(WORDS, kind), pa.array(WORDS, pa.string()))
    plain = pa.array(BAGS, pa.list_(pa.string()))
    for lists in (pa.list_, pa.large_list) if not pa.types.is_dictionary(kind) else (pa.list_,):
        _same(schema, tmp_path, "a", _array(BAGS, lists(kind)), plain)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [*INTEGERS, *FLOATS, pa.bool_()], ids=str)
def test_numbers_of_every_type_are_read_alike(tmp_path: Path, kind: pa.DataType) -> None:
    """As labels, weights of examples, numbers, buckets and ids, and in lists as ids and as their weights."""
    targets = {
        "y": 'label = "y"\nsparse = ["ids"]',
        "w": 'label = "y"\nexample_weight = "w"\nsparse = ["ids"]',
        "x": 'label = "y"\ndense = ["x"]\nsparse = ["ids"]',
        "b": 'label = "y"\nsparse = [{ name = "b", buckets = "log" }]',
    }
    values = [bool(value) if value is not None else None for value in NUMBERS] if kind == pa.bool_() else NUMBERS
    for name, schema in targets.items():
        _same(schema, tmp_path, name, pa.array(values, kind), pa.array(NUMBERS, pa.float64()))
    if pa.types.is_integer(kind):
        _same('label = "y"\nsparse = ["a"]', tmp_path, "a", pa.array(NUMBERS, kind), pa.array(NUMBERS, pa.int64()))
        name, schema, plain = "a", 'label = "y"\nsparse = ["a"]', pa.int64()
    elif pa.types.is_floating(kind):
        name, schema, plain = "a", 'label = "y"\nsparse = [{ name = "ids", weight = "a" }]', pa.float64()
    else:
        return
    for lists in (pa.list_, pa.large_list):
        _same(schema, tmp_path, name, pa.array(NUMBER_BAGS, lists(kind)), pa.array(NUMBER_BAGS, pa.list_(plain)))
    _same(schema, tmp_path, name, pa.array(PAIRS, pa.list_(kind, 2)), pa.array(PAIRS, pa.list_(plain)))
