from __future__ import annotations

import dataclasses
import gzip
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.types.schema import Table
from data.columns import Columns
from data.criteo import CriteoSource, explain_line, parse_lines, transform_dense
from data.schema_file import criteo_schema
from data.source import Segment
from data.testing import check_source
from tests.data.files import criteo_line, criteo_lines, real_samples


def parse_slowly(text: bytes) -> tuple[list[float], list[list[int]], list[list[int | None]]]:
    """Reference parser: one field at a time."""
    labels, dense, ids = [], [], []
    for line in text.decode().splitlines():
        fields = line.split("\t")
        labels.append(float(fields[0]))
        dense.append([int(field or "0") for field in fields[1:14]])
        ids.append([int(field, 16) - (int(field, 16) >> 63 << 64) if field else None for field in fields[14:]])
    return labels, dense, ids


def read_all(source: CriteoSource) -> list[Columns]:
    return [source.read(block) for segment in source.segments() for block in source.blocks(segment)]


GOLDEN = [
    # field of an id column -> int64
    ("0", 0),
    ("a", 10),
    ("Ff", 255),
    ("7fffffff", 2**31 - 1),
    ("80000000", 2**31),
    ("77dabff5e9", 0x77DABFF5E9),
    ("7fffffffffffffff", 2**63 - 1),
    ("8000000000000000", -(2**63)),
    ("ffffffffffffffff", -1),
    ("0000000000000001", 1),
]


@pytest.mark.parametrize(("text", "expected"), GOLDEN)
def test_ids_of_any_width(text: str, expected: int) -> None:
    assert parse_lines(criteo_line(sparse=text) + b"\n").ids.tolist() == [[expected]] * 26


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("0", 0), ("-0", 0), ("7", 7), ("-3", -3), ("00012", 12), ("12345678", 12345678),
     ("123456789", 123456789), ("-1234567890123456", -1234567890123456), ("9999999999999999", 9999999999999999)],
)  # fmt: skip
def test_integers_of_any_width(text: str, expected: int) -> None:
    assert parse_lines(criteo_line(dense=text) + b"\n").dense.tolist() == [[expected] * 13]


def test_dense_is_log_of_one_plus_clipped() -> None:
    got = transform_dense(np.array([[-5, 0, 1, 17874]], np.int64))
    assert got.dtype == np.float32
    assert got.tolist() == [[0.0, 0.0, np.float32(math.log(2)), np.float32(math.log1p(17874))]]


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_equals_a_plain_parser(seed: int, rows: int) -> None:
    text = criteo_lines(rows, seed)
    parsed = parse_lines(text)
    labels, dense, ids = parse_slowly(text)
    assert parsed.bad_lines.size == 0
    assert parsed.labels.tolist() == labels
    assert parsed.dense.tolist() == dense
    got = [
        [int(value) if there else None for value, there in zip(row, present, strict=True)]
        for row, present in zip(parsed.ids.T, parsed.present.T, strict=True)
    ]
    assert got == ids


def test_more_lines_than_one_chunk() -> None:
    text = criteo_lines(2500)
    assert parse_lines(text).dense.tolist() == parse_slowly(text)[1]


@given(st.data())
def test_a_line_is_bad_exactly_when_the_rules_say_so(data: st.DataObject) -> None:
    lines = criteo_lines(6, data.draw(st.integers(0, 1000))).split(b"\n")[:-1]
    for _ in range(data.draw(st.integers(0, 3))):
        number = data.draw(st.integers(0, len(lines) - 1))
        at = data.draw(st.integers(0, len(lines[number])))
        change = data.draw(st.sampled_from([b"\t", b"x", b"\0", b"-", b"\r", b" ", b"\x01", b"2", b"\xff", b""]))
        lines[number] = lines[number][:at] + change + lines[number][at + data.draw(st.integers(0, 2)) :]
    parsed = parse_lines(b"\n".join(lines) + b"\n")
    assert parsed.bad_lines.tolist() == [n for n, line in enumerate(lines) if explain_line(line) is not None]
    good = [line for line in lines if explain_line(line) is None]
    if good:
        assert parsed.dense.tolist() == parse_slowly(b"\n".join(good) + b"\n")[1]


GOOD = criteo_line()
BAD = [
    # a line, what the message says
    (GOOD + b"\ta", "expected 40 tab-separated columns, got 41"),
    (GOOD.rsplit(b"\t", 1)[0], "expected 40 tab-separated columns, got 39"),
    (b"", "expected 40 tab-separated columns, got 1"),
    (criteo_line(label="2"), "expected label 0 or 1 in column 1, got '2'"),
    (criteo_line(label=""), "expected label 0 or 1 in column 1, got ''"),
    (criteo_line(label="-1"), "expected label 0 or 1 in column 1, got '-1'"),
    (criteo_line(dense="1.5"), "expected an integer of up to 16 digits in I1 (column 2), got '1.5'"),
    (criteo_line(dense="1a"), "expected an integer of up to 16 digits in I1 (column 2), got '1a'"),
    (criteo_line(dense="-"), "expected an integer of up to 16 digits in I1 (column 2), got '-'"),
    (criteo_line(dense="1" * 17), "expected an integer of up to 16 digits in I1 (column 2), got '11111111111111111'"),
    (criteo_line(sparse="12g4"), "expected a hexadecimal id of up to 16 digits in C1 (column 15), got '12g4'"),
    (criteo_line(sparse="-a"), "expected a hexadecimal id of up to 16 digits in C1 (column 15), got '-a'"),
    (
        criteo_line(sparse="f" * 17),
        "expected a hexadecimal id of up to 16 digits in C1 (column 15), got 'fffffffffffff",
    ),
    (GOOD.replace(b"a", b"\0", 1), "expected text, got a NUL byte at column 29 of the line"),
    (GOOD + b"\r", "expected the line to end in LF, got CRLF line ends"),
]


@pytest.mark.parametrize("place", [0, 3, 59])
@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, place: int, line: bytes, message: str) -> None:
    lines = criteo_lines(60).split(b"\n")[:-1]
    lines[place] = line
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    for block_bytes in (100, 1 << 20):
        with pytest.raises(InputError, match=re.escape(f"{path}:{place + 1}: {message}")) as raised:
            read_all(CriteoSource(files=(str(path),), block_bytes=block_bytes))
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_skipped_and_counted(tmp_path: Path, line: bytes, message: str) -> None:
    lines = criteo_lines(12).split(b"\n")[:-1]
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\n".join([*lines[:4], line, *lines[4:], line]) + b"\n")
    (columns,) = read_all(CriteoSource(files=(str(path),), bad_rows="skip"))
    path.write_bytes(b"\n".join(lines))
    (expected,) = read_all(CriteoSource(files=(str(path),)))
    assert columns.bad_rows.tolist() == [4, 13]
    assert columns.num_raw_rows == 14
    for name in ("labels", "dense", "values", "lengths"):
        np.testing.assert_array_equal(getattr(columns, name), getattr(expected, name))


def test_tables_may_hash_or_bound_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "two.tsv"
    path.write_bytes(criteo_line(sparse="9") + b"\n" + criteo_line(sparse="b") + b"\n")
    tables = {"C1": Table(name="C1", rows=10), "C2": Table(name="C2", rows=5, hash=True)}
    schema = criteo_schema()
    schema = dataclasses.replace(schema, tables=tuple(tables.get(table.name, table) for table in schema.tables))
    with pytest.raises(InputError, match=re.escape(f"{path}:2: expected ids of table 'C1' in [0, 10), got 11 (b)")):
        read_all(CriteoSource(files=(str(path),), schema=schema))
    (columns,) = read_all(CriteoSource(files=(str(path),), schema=schema, bad_rows="skip"))
    assert columns.bad_rows.tolist() == [1]
    assert columns.values[0] == 9
    assert 0 <= columns.values[1] < 5


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_blocks_hold_every_line_once(tmp_path: Path, ending: bytes) -> None:
    text = criteo_lines(50)
    path = tmp_path / "some.tsv"
    path.write_bytes(text.rstrip(b"\n") + ending)
    for block_bytes in (1, 100, 1000, 10**6):
        source = CriteoSource(files=(str(path),), block_bytes=block_bytes)
        dense = np.concatenate([columns.dense for columns in read_all(source)])
        assert dense.tolist() == transform_dense(parse_lines(text).dense).tolist()
        assert sum(source.count_rows(segment) for segment in source.segments()) == 50


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_keeps_a_readers_promises(criteo_path: Path, bad_rows: str) -> None:
    check_source(CriteoSource.at(str(criteo_path), bad_rows=bad_rows, block_bytes=2500))


def test_keeps_its_promises_with_bad_rows(tmp_path: Path) -> None:
    lines = criteo_lines(60).split(b"\n")[:-1]
    for number in (0, 7, 8, 9, 30, 58):
        lines[number] = b"bad"
    path = tmp_path / "bad.tsv"
    path.write_bytes(b"\n".join(lines) + b"\n")
    check_source(CriteoSource.at(str(path), bad_rows="skip", block_bytes=2500))


@pytest.mark.parametrize("path", real_samples(), ids=str)
def test_the_real_sample(path: Path) -> None:
    columns = read_all(CriteoSource.at(str(path)))
    assert sum(part.bad_rows.size for part in columns) == 0
    assert 0.02 < np.concatenate([part.labels for part in columns]).mean() < 0.3


@pytest.fixture(params=["plain", "gz", "folder"])
def criteo_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """60 lines in each storage form: plain, .gz, a folder."""
    text = criteo_lines(60)
    if request.param == "plain":
        path = tmp_path / "criteo.tsv"
        path.write_bytes(text)
    elif request.param == "gz":
        path = tmp_path / "criteo.tsv.gz"
        path.write_bytes(gzip.compress(text))
    else:
        path = tmp_path / "days"
        path.mkdir()
        lines = text.splitlines(keepends=True)
        (path / "day_0").write_bytes(b"".join(lines[:25]))
        (path / "day_2.gz").write_bytes(gzip.compress(b"".join(lines[25:50])))
        (path / "day_10").write_bytes(b"".join(lines[50:]))
    return path


def test_all_forms_hold_the_same_rows(criteo_path: Path) -> None:
    dense = np.concatenate([columns.dense for columns in read_all(CriteoSource.at(str(criteo_path)))])
    assert dense.tolist() == transform_dense(parse_lines(criteo_lines(60)).dense).tolist()


def test_a_segment_of_a_shrunken_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.tsv"
    path.write_bytes(criteo_lines(2))
    source = CriteoSource.at(str(path))
    (block,) = source.blocks(Segment(file=str(path), start=0, stop=10**6))
    with pytest.raises(InputError, match="the file shrank"):
        source.read(block)
