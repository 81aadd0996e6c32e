from __future__ import annotations

import re
from pathlib import Path

import pytest

from bagpipe.errors import InputError
from bagpipe.types.schema import Feature, Table
from data.log_buckets import LogBuckets
from data.schema_file import FeatureColumn, criteo_schema, override_tables, parse_schema, read_schema_file
from data.string_ids import StringIds

WHOLE = """
label = "click"
dense = ["age", "price"]
sparse = ["user", { name = "seen", table = "items", weight = "seen_w" }, { name = "item", table = "items" }, "tags"]

[table_defaults]
dim = 16

[tables.items]
rows = 1000
hash = true
dim = 32

[tables.tags]
pooling = "mean"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "schema.toml"
    path.write_text(text)
    return str(path)


def test_a_whole_schema(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    found = parse_schema(path, read_schema_file(path))
    assert found.schema.label == "click"
    assert found.schema.dense == ("age", "price")
    assert found.schema.features == (
        Feature(name="user", table="user"),
        Feature(name="seen", table="items", weighted=True),
        Feature(name="item", table="items"),
        Feature(name="tags", table="tags"),
    )
    assert found.schema.tables == (
        Table(name="user", dim=16),
        Table(name="items", rows=1000, hash=True, dim=32),
        Table(name="tags", dim=16, pooling="mean"),
    )
    assert found.weights == {"seen": "seen_w"}


def test_criteo() -> None:
    schema = criteo_schema()
    assert (len(schema.dense), len(schema.features), len(schema.tables)) == (13, 26, 26)
    assert schema.features[25] == Feature(name="C26", table="C26")
    assert schema.tables[0] == Table(name="C1")


def test_overriding_tables(tmp_path: Path) -> None:
    path = write(tmp_path, "[table_defaults]\nrows = 100\nhash = true\n[tables.C3]\nrows = 7")
    schema = override_tables(path, read_schema_file(path), criteo_schema())
    assert schema.table("C1") == Table(name="C1", rows=100, hash=True)
    assert schema.table("C3") == Table(name="C3", rows=7, hash=True)


BAD = [
    ("labl = 'x'", "unknown key 'labl', known keys: label, dense"),
    ("label = 3", "label must be a string or a list, got 3"),
    ("label = []\nsparse = ['a']", "label is missing: name the label column"),
    ("label = ['y', 3]\nsparse = ['a']", "label must be a column name or a list of them, got ['y', 3]"),
    ("label = ['y', 'y']\nsparse = ['a']", "label names must be unique, 'y' appears more than once"),
    ("example_weight = 3", "example_weight must be a string, got 3"),
    ("time = 3", "time must be a string, got 3"),
    ("label = 'y'\nsparse = ['a']\ntime = ''", "time must be the name of a column, got an empty one"),
    ("label = 'y'\nsparse = ['a']\ntime = 't'\ntime_unit = 'h'", "time_unit must be one of s, ms, us, got 'h'"),
    ("label = 'y'\nsparse = ['a']\ntime_unit = 's'", "time_unit is of the column that time names, got no time"),
    ("= 3", "not valid TOML: "),
    ("sparse = ['a']", "label is missing: name the label column"),
    ("label = 'y'", "sparse is missing: name the sparse columns"),
    ("label = 'y'\nsparse = ['a', 'a']", "feature names must be unique, 'a' appears more than once"),
    ("label = 'y'\nsparse = [3]", "sparse[0] must be a column name or a table, got 3"),
    ("label = 'y'\nsparse = [{ table = 'a' }]", "sparse[0]: name is missing"),
    ("label = 'y'\nsparse = [{ name = 'a', tabel = 'b' }]", "sparse[0]: unknown key 'tabel'"),
    ("label = 'y'\nsparse = ['a']\ndense = [1]", "dense must be a list of column names, got [1]"),
    ("label = 'y'\nsparse = ['a']\n[tables.b]\ndim = 3", "tables.b: no such table, known tables: a"),
    ("label = 'y'\nsparse = ['a']\n[tables.a]\nsize = 3", "tables.a: unknown key 'size', known keys: rows, hash, dim"),
    ("label = 'y'\nsparse = ['a']\n[tables.a]\nrows = '3'", "tables.a: rows must be an integer, got '3'"),
    ("label = 'y'\nsparse = ['a']\n[tables.a]\nrows = true", "tables.a: rows must be an integer, got True"),
    ("label = 'y'\nsparse = ['a']\n[tables.a]\nhash = true", "table 'a': hash needs rows"),
    ("label = 'y'\nsparse = ['a']\n[tables]\na = 3", "tables.a must be a table, got 3"),
    ("label = 'y'\nsparse = ['a']\n[tables.a]\npooling = 'max'", "pooling must be sum, mean or none, got 'max'"),
    (
        "label = 'y'\nsparse = [{ name = 'a', weight = 'w' }]\n[tables.a]\npooling = 'mean'",
        "feature 'a' has weights, so its table 'a' must not be mean-pooled",
    ),
    ("label = 'y'\nsparse = ['a']\n[movielens]\npositive_rating = 3", "movielens is for data.format movielens"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_mistakes_are_named_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as raised:
        parse_schema(path, read_schema_file(path))
    assert message in str(raised.value)
    assert str(raised.value).startswith(path)
    assert "\n" not in str(raised.value)


def test_a_byte_order_mark_is_no_part_of_it(tmp_path: Path) -> None:
    text = "label = 'y'\nsparse = ['a']"
    path = write(tmp_path, f"\ufeff{text}")
    assert read_schema_file(path) == read_schema_file(write(tmp_path, text))


def test_a_missing_file() -> None:
    with pytest.raises(InputError, match=r"schema: cannot read /nowhere/x.toml: No such file"):
        read_schema_file("/nowhere/x.toml")


def test_strings_separators_and_buckets(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        label = "y"
        sparse = ["a", "b", { name = "c", column = "x", separator = "|" }, { name = "d", buckets = "log", base = 10 }]
        [table_defaults]
        strings = "hash"
        string_seed = 7
        [tables.b]
        strings = "dictionary"
        [tables.c]
        strings = "dictionary"
        dictionary = "/elsewhere/c.csv"
        [tables.d]
        strings = "none"
        [csv]
        delimiter = ";"
        """,
    )
    found = parse_schema(path, read_schema_file(path))
    assert found.columns == {
        "c": FeatureColumn(name="x", separator="|"),
        "d": FeatureColumn(name="d", buckets=LogBuckets(rule="log", base=10.0)),
    }
    assert found.strings == {
        "a": StringIds(seed=7),
        "b": StringIds(dictionary=str(tmp_path / "b.dictionary.csv")),
        "c": StringIds(dictionary="/elsewhere/c.csv"),
    }
    assert found.csv == {"delimiter": ";"}


BAD_KEYS = [
    ('strings = "md5"', "table 'a': strings must be one of none, hash, dictionary, got 'md5'"),
    ('strings = "hash"\nstring_seed = -1', "table 'a': string_seed must be from 0 to 2**64 - 1, got -1"),
    ('strings = "hash"\nrows = 9', "table 'a': hashed strings are 64-bit ids: rows needs hash = true, to fold them"),
    ("strings = true", "tables.a: strings must be a string, got True"),
]


@pytest.mark.parametrize(("keys", "message"), BAD_KEYS)
def test_unusable_strings_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    path = write(tmp_path, f'label = "y"\nsparse = ["a"]\n[tables.a]\n{keys}')
    with pytest.raises(InputError, match=re.escape(message)):
        parse_schema(path, read_schema_file(path))


BAD_SPARSE = [
    ('separator = ""', 'sparse[0]: separator must be a text such as "|", got an empty one'),
    ('separator = "|", buckets = "log"', "sparse[0]: buckets are of one number, so they do not go together"),
    ('buckets = "sqrt"', "sparse[0]: buckets must be one of log-squared, log, got 'sqrt'"),
    ('buckets = "log", base = 1', "sparse[0]: base must be at least 1.01, got 1.0"),
    ("base = 2", 'sparse[0]: base is of buckets = "log", got none'),
]


@pytest.mark.parametrize(("keys", "message"), BAD_SPARSE)
def test_unusable_columns_are_refused(tmp_path: Path, keys: str, message: str) -> None:
    path = write(tmp_path, f'label = "y"\nsparse = [{{ name = "a", {keys} }}]')
    with pytest.raises(InputError, match=re.escape(message)):
        parse_schema(path, read_schema_file(path))


def test_formats_of_numbers_have_no_strings(tmp_path: Path) -> None:
    path = write(tmp_path, '[tables.C1]\nstrings = "hash"')
    with pytest.raises(InputError, match="C1: strings is for columns of strings, this format has numbers only"):
        override_tables(path, read_schema_file(path), criteo_schema())
