from __future__ import annotations

import dataclasses
import gzip
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.checked_read import read_checked
from data.cli import main
from data.columns import Columns
from data.csv import CsvSource
from data.formats import open_source
from data.loader import LookaheadLoader
from data.string_hash import hash_strings
from data.testing import assert_same_batches, check_source, read_all
from tests.data.documented import documented

SCHEMA = """
label = "y"
dense = ["age"]
sparse = [
    "user",
    "city",
    { name = "tags", separator = "|", weight = "share" },
    { name = "age_bucket", column = "age", buckets = "log", base = 10 },
]
[tables.city]
strings = "hash"
string_seed = 5
[tables.tags]
rows = 50
"""
HEADER = "unused,y,age,user,city,tags,share"


def write(folder: Path, *lines: str, schema: str = SCHEMA, name: str = "a.csv", header: str = HEADER) -> CsvSource:
    (folder / "schema.toml").write_text(schema)
    (folder / name).write_text("".join(f"{line}\n" for line in [header, *lines] if line), newline="")
    return CsvSource.at(str(folder / name), schema_path=str(folder / "schema.toml"))


def read(source: CsvSource) -> list[Columns]:
    return [read_checked(source, block) for segment in source.segments() for block in source.blocks(segment)]


def lines_of(rows: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    found = []
    for _ in range(rows):
        bag = rng.randrange(3)
        tags, shares = ["3"] * bag, ["0.5"] * bag
        user, city = rng.choice(["", "-1", str(2**63 - 1), "7"]), rng.choice(["", "Rome", '"a, b"'])
        found.append(
            f"x,{rng.randrange(2)},{rng.choice(['', '1.5'])},{user},{city},{'|'.join(tags)},{'|'.join(shares)}"
        )
    return found


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    source = write(tmp_path, "x,1,150,7,Rome,3|17,0.5|2", "x,0,,,,,", 'x,0.5,0.1,-1,"a, b",3,1')
    (columns,) = read(source)
    rome, both = hash_strings(pa.array(["Rome", "a, b"]), 5).tolist()
    assert columns.labels.tolist() == [1, 0, 0.5]
    assert columns.dense.tolist() == [[150], [0], [np.float32(0.1)]]
    assert columns.lengths.tolist() == [[1, 0, 1], [1, 0, 1], [2, 0, 1], [1, 0, 1]]
    assert columns.values.tolist() == [7, -1, rome, both, 3, 17, 3, 3, 0]
    assert columns.weights is not None
    assert columns.weights.tolist() == [1, 1, 1, 1, 0.5, 2, 1, 1, 1]
    assert source.multi_hot == {"tags"}


def test_the_shape_of_the_file_does_not_matter(tmp_path: Path) -> None:
    lines = lines_of(30)
    whole = write(tmp_path, *lines)
    expected = read_all(LookaheadLoader(whole, batch_size=7))
    schema = str(tmp_path / "schema.toml")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    (tmp_path / "crlf.csv").write_bytes((tmp_path / "a.csv").read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    (tmp_path / "cut.csv").write_bytes((tmp_path / "a.csv").read_bytes()[:-1])
    for name in ("a.csv.gz", "crlf.csv", "bom.csv", "cut.csv"):
        source = CsvSource.at(str(tmp_path / name), schema_path=schema, block_bytes=100)
        assert_same_batches(read_all(LookaheadLoader(source, batch_size=7)), expected)
    folder = tmp_path / "days"
    folder.mkdir()
    write(folder, *lines[:11], name="day_2.csv")
    turned = [",".join(line.split(",")) for line in lines[11:]]
    write(folder, *turned, name="day_10.csv")
    (folder / "schema.toml").unlink()
    source = CsvSource.at(str(folder), schema_path=schema)
    assert_same_batches(read_all(LookaheadLoader(source, batch_size=7)), expected)


def test_each_file_has_its_own_order_of_columns(tmp_path: Path) -> None:
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "1.csv").write_text("y,age,user,city,tags,share\n1,2,3,,,\n")
    (folder / "2.csv").write_text("share,tags,city,user,age,y\n,,,3,2,1\n")
    (tmp_path / "s.toml").write_text(SCHEMA)
    first, second = read(CsvSource.at(str(folder), schema_path=str(tmp_path / "s.toml")))
    assert first.values.tolist() == second.values.tolist() == [3, 1]


def test_tabs_no_header_and_named_missing_values(tmp_path: Path) -> None:
    layout = '[csv]\ndelimiter = "\\t"\ncolumns = ["y", "age", "user"]\nnull = ["NULL"]\nquote = ""\n'
    schema = 'label = "y"\ndense = ["age"]\nsparse = ["user"]\n' + layout
    (columns,) = read(write(tmp_path, "1\tNULL\t7", "0\t2\tNULL", schema=schema, header=""))
    assert columns.dense.tolist() == [[0], [2]]
    assert columns.lengths.tolist() == [[1, 0]]


def test_a_named_missing_value_is_a_whole_value(tmp_path: Path) -> None:
    """In a list its text is one like any other: a name among strings, and no number."""
    schema = """
label = "y"
sparse = [{ name = "tags", separator = "|" }, { name = "seen", separator = "|", weight = "share" }]
[tables.tags]
strings = "hash"
[csv]
null = ["NA", "nan"]
"""
    lines = ("1,Oslo|NA,,", "1,NA,3|4,1|2", "1,nan,NA,nan", "1,,3|NA,1|2", "1,,3|4,1|nan")
    source = write(tmp_path, *lines, schema=schema, header="y,tags,seen,share")
    with pytest.raises(InputError, match=r"a.csv:5: expected integer ids in column 'seen', got 'NA'"):
        read(source)
    (columns,) = read(dataclasses.replace(source, bad_rows="skip"))
    assert columns.bad_rows.tolist() == [3, 4]
    assert columns.lengths.tolist() == [[2, 0, 0], [0, 2, 0]]
    assert columns.values.tolist() == [*hash_strings(pa.array([b"Oslo", b"NA"]), 0).tolist(), 3, 4]
    with pytest.raises(InputError, match=r"a.csv:2: expected numbers in column 'share', got 'nan'"):
        read(write(tmp_path, lines[4], schema=schema, header="y,tags,seen,share"))


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_keeps_a_readers_promises(tmp_path: Path, name: str) -> None:
    lines = lines_of(60)
    for place, bad in ((7, "x,1"), (8, 'x,"1,2,3,4,5,6'), (20, "x,1,1,x,,,"), (21, "x,1,1,1,,99,1"), (44, "x,7,,,,,")):
        lines[place] = bad
    write(tmp_path, *lines)
    path = tmp_path / name
    path.write_bytes(
        (tmp_path / "a.csv").read_bytes() if path.suffix != ".gz" else gzip.compress((tmp_path / "a.csv").read_bytes())
    )
    source = CsvSource.at(str(path), schema_path=str(tmp_path / "schema.toml"), bad_rows="skip", block_bytes=200)
    check_source(source)
    assert sum(part.bad_rows.size for part in read(source)) == 5


BAD_ROWS = [
    ("x,1", "expected 7 columns separated by ',', got 2"),
    ("", "expected a number in column 'y', got null"),
    ("x,yes,1,1,,,", "expected a number in column 'y', got 'yes'"),
    ("x,2,1,1,,,", "expected a label in [0, 1] in column 'y', got 2.0"),
    ("x,1,nan,1,,,", "expected a finite number in column 'age', got nan or infinity"),
    ("x,1,1,u17,,,", "expected an integer in column 'user', got 'u17'"),
    ("x,1,1,1,,3|x,1|1", "expected integer ids in column 'tags', got 'x'"),
    ("x,1,1,1,,3|,1|1", "expected ids in column 'tags', got nothing beside a '|'"),
    ("x,1,1,1,,3|4,1", "expected as many weights in 'share' as ids in 'tags', got another number"),
    ("x,1,1,1,,3|4,1|x", "expected numbers in column 'share', got 'x'"),
    ("x,1,1,1,,50,1", "expected ids of table 'tags' in [0, 50), got 50"),
    ('x,1,1,1,"Rome,,', "expected 7 columns separated by ',', got 5"),
]


@pytest.mark.parametrize(("line", "message"), BAD_ROWS)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, line: str, message: str) -> None:
    source = write(tmp_path, "x,1,,,,,", "x,0,,,,,")
    path = tmp_path / "a.csv"
    path.write_text(path.read_text() + line + "\nx,1,2,3,,,\n")
    with pytest.raises(InputError, match=re.escape(f"{path}:4: {message}")):
        read(source)
    skipping = CsvSource.at(str(path), schema_path=str(tmp_path / "schema.toml"), bad_rows="skip")
    (columns,) = read(skipping)
    assert (columns.bad_rows.tolist(), columns.num_raw_rows, columns.labels.tolist()) == ([2], 4, [1, 0, 1])


def test_the_first_of_several_bad_lines_is_named(tmp_path: Path) -> None:
    """Whatever is wrong with it: values out of range are found after the lines that cannot be parsed."""
    with pytest.raises(InputError, match=r"a.csv:3: expected ids of table 'tags' in \[0, 50\), got 99"):
        read(write(tmp_path, "x,1,,,,,", "x,1,1,1,,99,1", "x,1"))


BAD_FILES = [
    ("y,age,user,city,tags\n1,,,,\n", "{path}:1: expected a column 'share', got none in 'y,age,user,city,tags'"),
    ("y,y,age,user,city,tags,share\n1,1,,,,,\n", "{path}:1: expected a column 'y', got several in 'y,y,age"),
    (HEADER + "\n", "{path}: the file holds nothing but its header"),
    ("", "{path}: the file is empty, expected lines of text"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_unusable_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    (tmp_path / "s.toml").write_text(SCHEMA)
    with pytest.raises(InputError, match=re.escape(message.format(path=path))):
        read(CsvSource.at(str(path), schema_path=str(tmp_path / "s.toml")))


def test_a_schema_is_needed(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match=r"data\.schema is empty: csv needs a TOML file that names label"):
        open_source(DataConfig(format="csv", path=str(tmp_path / "a.csv")))


def test_a_column_is_text_or_a_number(tmp_path: Path) -> None:
    schema = 'label = "y"\ndense = ["age"]\nsparse = ["age"]\n[tables.age]\nstrings = "hash"'
    with pytest.raises(InputError, match=r"schema\.toml: column 'age' is named as text and as a number"):
        write(tmp_path, schema=schema)


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, and its command that builds the dictionary."""
    (text,), (schema,) = documented("Separated text", "text"), documented("Separated text", "toml")
    (tmp_path / "clicks.csv").write_text(text)
    (tmp_path / "clicks.toml").write_text(schema)
    monkeypatch.chdir(tmp_path)
    (commands,) = documented("Separated text", "sh")
    convert = commands.splitlines()[0].split()
    assert convert[:3] == ["python", "-m", "data"]
    assert main(convert[3:]) == 0
    assert (tmp_path / "seen.csv").read_text() == documented("Strings as ids", "text")[0]
    source = open_source(DataConfig(format="csv", path="clicks.csv", schema="clicks.toml"))
    (batch,) = read_all(LookaheadLoader(source, batch_size=10))
    assert batch.dense.tolist() == [[3.5], [0], [100]]
    assert batch.lengths.tolist() == [[1, 1, 0], [1, 0, 1], [2, 0, 1], [1, 0, 1]]
    assert batch.values[[0, 1, 4, 5, 6, 7, 8]].tolist() == [17, 4, 2, 1, 1, 1, 21]
    converted = open_source(DataConfig(format="parquet", path="clicks.arrow"))
    assert_same_batches(read_all(LookaheadLoader(converted, batch_size=10)), [batch])
