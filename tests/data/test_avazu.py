from __future__ import annotations

import datetime
import gzip
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from data.avazu import AvazuSource, avazu_schema
from data.columns import Columns
from data.delimited import DelimitedFile
from data.formats import open_source
from data.row_order import RowIndex
from data.source import Block, Source
from data.testing import check_source
from tests.data.files import AVAZU_NAMES, avazu_csv, avazu_row, avazu_rows

NAMES = [feature.name for feature in avazu_schema().features]


def read_all(source: Source) -> list[Columns]:
    return [source.read(block) for segment in source.segments() for block in source.blocks(segment)]


def write(path: Path, text: bytes) -> AvazuSource:
    path.write_bytes(text)
    return AvazuSource.at(str(path))


def read_slowly(row: dict[str, str]) -> dict[str, int | None]:
    """Reference parser: the features of a line, one field at a time."""
    when = datetime.datetime.strptime(row["hour"], "%y%m%d%H")
    found: dict[str, int | None] = {"hour": when.hour, "weekday": when.weekday()}
    for name in NAMES[2:]:
        base = 16 if name.startswith(("site_", "app_", "device_i", "device_m")) else 10
        number = int(row[name], base) if row[name] else None
        found[name] = number if number is None or number < 2**63 else number - 2**64
    return found


def rows_of(columns: Columns) -> list[dict[str, int | None]]:
    values = iter(columns.values.tolist())
    features = [[next(values) if there else None for there in lengths] for lengths in columns.lengths]
    return [dict(zip(NAMES, row, strict=True)) for row in zip(*features, strict=True)]


def test_the_features() -> None:
    assert len(NAMES) == 23
    assert set(NAMES) == {"weekday", *AVAZU_NAMES} - {"id", "click"}


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_equals_a_plain_parser(seed: int, rows: int, end: str, shuffled: bool) -> None:
    written = avazu_rows(rows, seed)
    names = random.Random(seed).sample(AVAZU_NAMES, len(AVAZU_NAMES)) if shuffled else AVAZU_NAMES
    text = avazu_csv(written, names, end).partition(b"\n")[2]
    positions = tuple(names.index(name) for name in ("click", "hour", *NAMES[2:]))
    source = AvazuSource(parts=(DelimitedFile(path="x", num_columns=len(names), positions=positions),))
    columns = source.read(Block(file="x", start=0, stop=0, line=2, payload=text))
    assert columns.labels.tolist() == [float(row["click"]) for row in written]
    assert rows_of(columns) == [read_slowly(row) for row in written]
    assert columns.dense.shape == (rows, 0)


def test_a_missing_hour_is_two_empty_bags(tmp_path: Path) -> None:
    (columns,) = read_all(write(tmp_path / "a.csv", avazu_csv([avazu_row(hour=""), avazu_row()])))
    assert columns.lengths[:2].tolist() == [[0, 1], [0, 1]]
    assert columns.values[:2].tolist() == [23, 1]  # 21 October 2014 was a Tuesday


BAD = [
    ({"click": "2"}, "expected 0 or 1 in click (column 2), got '2'"),
    ({"click": ""}, "expected 0 or 1 in click (column 2), got ''"),
    ({"hour": "14102124"}, "expected an hour as YYMMDDHH in hour (column 3), got '14102124'"),
    ({"hour": "14023001"}, "expected an hour as YYMMDDHH in hour (column 3), got '14023001'"),
    ({"hour": "2014102100"}, "expected an hour as YYMMDDHH in hour (column 3), got '2014102100'"),
    ({"hour": "141021 1"}, "expected an hour as YYMMDDHH in hour (column 3), got '141021 1'"),
    ({"site_id": "xyz"}, "expected a hexadecimal id of up to 16 digits in site_id (column 6), got 'xyz'"),
    (
        {"app_id": "f" * 17},
        "expected a hexadecimal id of up to 16 digits in app_id (column 9), got 'fffffffffffffffff'",
    ),
    ({"C1": "1.5"}, "expected an integer of up to 16 digits in C1 (column 4), got '1.5'"),
    ({"C21": "9" * 17}, "expected an integer of up to 16 digits in C21 (column 24), got '99999999999999999'"),
    ({"C21": "1,2"}, "expected 24 columns separated by ',', got 25"),
    ({"C14": "\0"}, "expected text, got a NUL at byte 129 of the line"),
]


@pytest.mark.parametrize("place", [0, 39])
@pytest.mark.parametrize(("values", "message"), BAD)
def test_a_bad_line_is_named_or_skipped(tmp_path: Path, place: int, values: dict[str, str], message: str) -> None:
    rows = avazu_rows(40)
    path = tmp_path / "bad.csv"
    path.write_bytes(avazu_csv([*rows[:place], avazu_row(**values), *rows[place:]]))
    for block_bytes in (300, 1 << 20):
        with pytest.raises(InputError) as raised:
            read_all(AvazuSource.at(str(path), block_bytes=block_bytes))
        assert str(raised.value) == f"{path}:{place + 2}: {message}"
    (columns,) = read_all(AvazuSource.at(str(path), bad_rows="skip"))
    assert columns.bad_rows.tolist() == [place]
    assert columns.num_raw_rows == 41
    assert rows_of(columns) == [read_slowly(row) for row in rows]


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    text = avazu_csv(avazu_rows(3)).rstrip(b"\n").rpartition(b",")[0]
    path = tmp_path / "short.csv"
    with pytest.raises(InputError, match=re.escape(f"{path}:4: expected 24 columns separated by ',', got 23")):
        read_all(write(path, text))


@pytest.mark.parametrize("ending", ["csv", "gz"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "the file is empty, expected lines of text"),
        (avazu_csv([]), "the file holds nothing but its header, expected lines of data"),
        (avazu_csv([]).rstrip(), "the file holds nothing but its header, expected lines of data"),
        (
            avazu_csv([avazu_row()], [name for name in AVAZU_NAMES if name != "click"]),
            "expected a header with a column",
        ),
        (avazu_csv([avazu_row()]).partition(b"\n")[2], "expected a header with a column 'click', got none in '10000"),
    ],
)
def test_files_without_rows_or_labels(tmp_path: Path, ending: str, text: bytes, message: str) -> None:
    path = tmp_path / f"a.{ending}"
    with pytest.raises(InputError, match=re.escape(message)) as raised:
        read_all(write(path, gzip.compress(text) if ending == "gz" else text))
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_tables_may_hash_or_bound_their_ids(tmp_path: Path) -> None:
    path, schema = tmp_path / "a.csv", tmp_path / "schema.toml"
    path.write_bytes(avazu_csv([avazu_row(C14="9"), avazu_row(C14="10")]))
    config = DataConfig(format="avazu-csv", path=str(path), schema=str(schema))
    schema.write_text("[tables.C14]\nrows = 10\n[tables.C20]\nrows = 7\nhash = true")
    with pytest.raises(InputError, match=re.escape(f"{path}:3: expected ids of table 'C14' in [0, 10), got 10")):
        read_all(open_source(config))
    (columns,) = read_all(open_source(DataConfig(**{**vars(config), "bad_rows": "skip"})))
    assert columns.bad_rows.tolist() == [1]
    (row,) = rows_of(columns)
    assert row["C14"] == 9
    assert 0 <= (row["C20"] or 0) < 7
    schema.write_text("label = 'x'")
    with pytest.raises(InputError, match=r"the columns of avazu-csv are fixed: .*, got label"):
        open_source(config)


@pytest.mark.parametrize("form", ["plain", "gz", "folder"])
def test_keeps_a_readers_promises(tmp_path: Path, form: str) -> None:
    rows = avazu_rows(40)
    path = tmp_path / "data"
    if form == "folder":  # each file has a header and can order its columns differently
        path.mkdir()
        (path / "part_2.csv").write_bytes(avazu_csv(rows[:15], AVAZU_NAMES[::-1]))
        (path / "part_10.csv.gz").write_bytes(gzip.compress(avazu_csv(rows[15:])))
    else:
        path = tmp_path / f"data.csv{'.gz' if form == 'gz' else ''}"
        path.write_bytes(gzip.compress(avazu_csv(rows)) if form == "gz" else avazu_csv(rows))
    source = AvazuSource.at(str(path), block_bytes=2000)
    assert [row for columns in read_all(source) for row in rows_of(columns)] == [read_slowly(row) for row in rows]
    assert RowIndex.scan(source, source.segments(), None).num_rows == 40
    check_source(source)


def test_keeps_its_promises_with_bad_rows(tmp_path: Path) -> None:
    rows = avazu_rows(40)
    for number in (0, 7, 8, 9, 30, 39):
        rows[number]["click"] = "x"
    path = tmp_path / "bad.csv"
    path.write_bytes(avazu_csv(rows))
    check_source(AvazuSource.at(str(path), bad_rows="skip", block_bytes=2000))


def test_more_lines_than_one_chunk(tmp_path: Path) -> None:
    rows = avazu_rows(50) * 100
    columns = read_all(write(tmp_path / "a.csv", avazu_csv(rows)))
    assert [row for part in columns for row in rows_of(part)] == [read_slowly(row) for row in rows]
    assert np.concatenate([part.labels for part in columns]).shape == (5000,)
