"""Values that are missing or impossible, such as labels that the loss is not defined for, whatever the reader."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.config.sections import DataConfig
from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.checked_read import read_checked
from data.columnar_writer import write_columnar
from data.columns import Columns
from data.formats import open_source
from data.hashing import hash_ids
from data.loader import LookaheadLoader
from data.parquet import ParquetSource
from data.source import Source
from data.testing import assert_same_batches, check_resume, read_all
from examples.own_reader import JsonLinesSource
from tests.data.files import avazu_csv, avazu_row, criteo_line, save_to_disk, write_examples

SCHEMA = 'label = "y"\ndense = ["age"]\nsparse = ["user"]\n[tables.user]\nrows = 50\n'
ABOVE_1 = float(np.nextafter(np.float32(1), np.float32(2)))
OUTSIDE = (-1.0, 2.0, 7.5, -1e-6, ABOVE_1, 1e300, math.inf, -math.inf, math.nan)


def write_parquet(folder: Path, labels: Any, users: Any = None, row_group_size: int = 7, name: str = "a") -> str:
    """A file whose row number is its dense column, and its schema."""
    rows = len(labels)
    columns = {"y": labels, "age": np.arange(rows) * 1.0, "user": np.arange(rows) % 50 if users is None else users}
    pq.write_table(pa.table(columns), folder / f"{name}.parquet", row_group_size=row_group_size)
    (folder / "a.toml").write_text(SCHEMA)
    return str(folder / f"{name}.parquet")


def parquet(path: str, **options: Any) -> ParquetSource:
    return ParquetSource.at(path, schema_path=str(Path(path).parent / "a.toml"), **options)


def served(source: Source, **options: Any) -> tuple[list[Batch], int]:
    """Batches and number of skipped rows."""
    with LookaheadLoader(source, batch_size=4, **options) as loader:
        return list(loader), loader.skipped_rows()


def row_numbers(batches: list[Batch]) -> list[int]:
    return [int(row) for batch in batches for row in batch.dense[:, 0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("label", OUTSIDE)
@pytest.mark.parametrize("row", [0, 10, 19])
def test_a_label_outside_the_range_is_named_or_skipped(tmp_path: Path, label: float, row: int) -> None:
    labels = [float(number % 2) for number in range(20)]
    labels[row] = label
    path = write_parquet(tmp_path, labels)
    with np.errstate(over="ignore"):
        got = str(np.float32(label))
    said = f"{path}: row {row} (from 0): expected a label in [0, 1] in column 'y', got {got}"
    with pytest.raises(InputError, match=re.escape(said) + "$"):
        served(parquet(path))
    batches, skipped = served(parquet(path, bad_rows="skip"))
    assert row_numbers(batches) == [number for number in range(20) if number != row]
    assert skipped == 1


def test_soft_labels_are_served_as_they_are(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).random(40).astype(np.float32)
    labels[:2] = 0, 1
    batches, skipped = served(parquet(write_parquet(tmp_path, labels)))
    assert np.concatenate([batch.labels for batch in batches]).tobytes() == labels.tobytes()
    assert skipped == 0


def test_nothing_but_bad_labels_is_an_error(tmp_path: Path) -> None:
    path = write_parquet(tmp_path, [2.0] * 9)
    with pytest.raises(InputError, match="expected at least one good row, got 9 malformed rows"):
        served(parquet(path, bad_rows="skip"))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), block_rows=st.integers(1, 30), row_group_size=st.integers(1, 30), shuffle=st.booleans())
def test_bad_labels_and_bad_ids_are_skipped_and_counted_together(
    tmp_path: Path, data: st.DataObject, block_rows: int, row_group_size: int, shuffle: bool
) -> None:
    """Wherever blocks begin, the rest is served, and a resumed reader counts the same."""
    kinds = data.draw(
        st.lists(st.sampled_from(["good", "good", "label", "id", "both", "null"]), min_size=1, max_size=30)
    )
    labels = [None if kind == "null" else 5.0 if kind in ("label", "both") else 0.25 for kind in kinds]
    users = [99 if kind in ("id", "both") else 3 for kind in kinds]
    source = parquet(
        write_parquet(tmp_path, pa.array(labels, pa.float64()), users, row_group_size),
        bad_rows="skip",
        block_rows=block_rows,
    )
    good = [number for number, kind in enumerate(kinds) if kind == "good"]
    if not good:
        with pytest.raises(InputError, match=f"got {len(kinds)} malformed rows"):
            served(source)
        return
    batches, skipped = served(source, shuffle=shuffle, epochs=2)
    found = row_numbers(batches)
    assert sorted(found[: len(good)]) == sorted(found[len(good) :]) == good
    assert skipped == 2 * (len(kinds) - len(good))
    check_resume(lambda state: LookaheadLoader(source, batch_size=4, shuffle=shuffle, epochs=2, state=state))


def json_lines(path: Path, labels: list[float]) -> str:
    rows = ({"clicked": label, "price": row, "user": f"u{row}"} for row, label in enumerate(labels))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_reader_of_the_users_own_is_checked_too(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "clicks.jsonl", [0.0, 1.0, 0.5, 3.0, 1.0])
    with pytest.raises(
        InputError, match=re.escape(f"{path}:4: expected a label in [0, 1] in column 'clicked', got 3.0")
    ):
        served(JsonLinesSource(files=(path,)))


def test_processes_and_resumed_readers_skip_the_same_labels(tmp_path: Path) -> None:
    labels = list(itertools.islice(itertools.cycle([0.0, 2.0, 1.0, 1.0, math.nan, 0.0, -1.0]), 100))
    parts = [labels[first : first + 10] for first in range(0, 100, 10)]  # a file is a block at least
    files = tuple(json_lines(tmp_path / f"{number}.jsonl", part) for number, part in enumerate(parts))
    source = JsonLinesSource(files=files, bad_rows="skip")
    good = [row for part in parts for row, label in enumerate(part) if label in (0, 1)]
    batches = check_resume(lambda state: LookaheadLoader(source, batch_size=4, state=state))
    assert row_numbers(batches) == good
    in_processes, skipped = served(source, workers=2)
    assert_same_batches(in_processes, batches)
    assert skipped == len(labels) - len(good)


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_convert_treats_bad_labels_like_other_bad_rows(tmp_path: Path, bad_rows: str) -> None:
    source = parquet(write_parquet(tmp_path, [0.0, 7.0, 1.0]), bad_rows=bad_rows)
    out = str(tmp_path / "out.arrow")
    if bad_rows == "stop":
        with pytest.raises(InputError, match=r"row 1 \(from 0\): expected a label in \[0, 1\]"):
            write_columnar(source, out)
        return
    written = write_columnar(source, out)
    assert (written.rows, written.skipped) == (2, 1)
    assert row_numbers(read_all(LookaheadLoader(ParquetSource.at(out), batch_size=4))) == [0, 2]


#: The columns of a row of each kind. In text, lists have a separator.
COLUMNS = """
label = "y"
example_weight = "w"
dense = ["x"]
time = "t"
sparse = [
    "user",
    { name = "tags", weight = "tag_w"%s },
    { name = "bucket", column = "b", buckets = "log" },
    { name = "one", weight = "one_w" },
]
[tables.user]
rows = 50
[tables.tags]
rows = 50
"""
LISTS = pa.list_(pa.int64())
TYPES = {
    "y": pa.float64(),
    "w": pa.float64(),
    "x": pa.float64(),
    "t": pa.int64(),
    "user": pa.int64(),
    "tags": LISTS,
    "tag_w": pa.list_(pa.float64()),
    "b": pa.float64(),
    "one": pa.int64(),
    "one_w": pa.float64(),
}
GOOD: dict[str, Any] = {"y": 1.0, "w": 2.0, "x": 0.5, "t": 1_700_000_000, "user": 3, "b": 8.0, "one": 4, "one_w": 0.5}
GOOD |= {"tags": [1, 2], "tag_w": [0.5, 0.25]}

NOT_FINITE = (math.nan, math.inf, -math.inf, 1e39)
#: Rows that are kept, as changes of `GOOD`, and rows that are bad.
KEPT: list[dict[str, Any]] = [
    *({"y": value} for value in (0.0, 0.25)),
    {"w": 0.0},
    *({"x": value} for value in (None, -3.0)),
    {"t": 0},
    {"user": None},
    *({"tags": value, "tag_w": value} for value in (None, [])),
    {"tag_w": [-1.0, 0.0]},
    *({"b": value} for value in (None, 0.0)),
    {"one": None, "one_w": None},
    {"one": -(2**63)},
]
BAD: list[dict[str, Any]] = [
    *({"y": value} for value in (None, *NOT_FINITE, 2.0, -1.0)),
    *({"w": value} for value in (None, *NOT_FINITE, -1.0)),
    *({"x": value} for value in NOT_FINITE),
    *({"t": value} for value in (None, -1, 10**12)),
    *({"user": value} for value in (50, -1)),
    *({"tags": value} for value in (None, [1], [1, None], [None, 2], [1, 50], [-1, 2])),
    *({"tag_w": value} for value in (None, [], [0.5], [0.5, None], *([value, 0.5] for value in NOT_FINITE))),
    *({"b": value} for value in NOT_FINITE[:3]),
    *({"one_w": value} for value in (None, *NOT_FINITE)),
    {"one": None},
]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(_text, value))
    return "" if value is None else str(value)


def _write(form: str, folder: Path, rows: list[dict[str, Any]]) -> DataConfig:
    """A file of these rows."""
    (folder / "s.toml").write_text(COLUMNS % (', separator = "|"' if form == "csv" else ""))
    table = pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in TYPES.items()})
    path = folder / f"rows.{form}"
    if form == "csv":
        lines = [TYPES, *([_text(row[name]) for name in TYPES] for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    elif form == "parquet":
        pq.write_table(table, path, row_group_size=7)
    elif form == "arrow":
        pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=7)
    elif form == "huggingface":
        save_to_disk(table, path, batch_rows=7)
    else:
        write_examples(path, rows)
    name = "parquet" if form == "arrow" else form
    return DataConfig(path=str(path), schema=str(folder / "s.toml"), format=name)  # type: ignore[arg-type]


def _read(config: DataConfig, bad_rows: str) -> list[Columns]:
    source = open_source(dataclasses.replace(config, bad_rows=bad_rows), wants_times=True)  # type: ignore[arg-type]
    return [read_checked(source, block) for segment in source.segments() for block in source.blocks(segment)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", ["parquet", "arrow", "huggingface", "csv", "tfrecord"])
def test_missing_and_impossible_values_mean_the_same_in_all_formats(tmp_path: Path, form: str) -> None:
    """Each kind of column (labels, weights of examples and of ids, numbers, times, ids, lists, buckets) with nulls,
    numbers that are not finite, and numbers out of range.
    """
    bad = [row for row in BAD if form != "tfrecord" or not _has_null(row)]  # lists of its messages hold no null
    rows = [GOOD | row for pair in itertools.zip_longest(KEPT, bad, fillvalue={}) for row in pair]
    is_bad = [any(row == GOOD | each for each in bad) for row in rows]  # a NaN of theirs is the same object
    parts = _read(_write(form, tmp_path, rows), "skip")
    starts = np.cumsum([0, *(part.num_raw_rows for part in parts)])
    found = [int(row) for part, start in zip(parts, starts, strict=False) for row in part.bad_rows + start]
    assert [rows[number] for number in set(found) ^ set(np.flatnonzero(is_bad))] == []
    kept = [row for row, out in zip(rows, is_bad, strict=True) if not out]
    assert np.concatenate([part.labels for part in parts]).tolist() == [row["y"] for row in kept]
    assert np.concatenate([part.dense for part in parts])[:, 0].tolist() == [row["x"] or 0.0 for row in kept]
    lengths = np.concatenate([part.lengths for part in parts], axis=1)
    assert lengths[1].tolist() == [len(row["tags"] or ()) for row in kept]
    assert lengths[0].tolist() == [int(row["user"] is not None) for row in kept]
    assert sum(part.values.size for part in parts) == lengths.sum()
    assert sum(part.weights.size for part in parts if part.weights is not None) == lengths.sum()
    for number, row in enumerate(bad[:: len(bad) // 9]):
        (tmp_path / str(number)).mkdir()
        (name, *_) = row
        with pytest.raises(InputError, match=rf"'{name}'|'tags'|expected a time of the years 1970"):
            _read(_write(form, tmp_path / str(number), [GOOD, GOOD | row]), "stop")


def _has_null(row: dict[str, Any]) -> bool:
    return any(isinstance(value, list) and None in value for value in row.values())


@pytest.mark.parametrize("form", ["parquet", "csv", "separated", "mlperf-npz", "avazu-csv", "criteo-tsv"])
def test_ids_of_2_to_63_and_more_are_one_rule(tmp_path: Path, form: str) -> None:
    """They have the bits of signed ids, which hexadecimal ids of Criteo have always had."""
    ids = [2**63 - 1, 2**63, 2**64 - 1, 5]
    path, schema = tmp_path / "a", tmp_path / "s.toml"
    schema.write_text("")
    names = 'label = "y"\nsparse = [{ name = "user"%s }]\n' % (', separator = "|"' if form == "separated" else "")
    if form == "parquet":
        pq.write_table(pa.table({"y": [0] * 4, "user": pa.array(ids, pa.uint64())}), path)
    elif form in ("csv", "separated"):
        path.write_text("y,user\n" + "".join(f"0,{number}\n" for number in ids))
    elif form == "mlperf-npz":
        path = tmp_path / "day_0_dense.npy"
        np.save(path, np.zeros((4, 1)))
        np.save(tmp_path / "day_0_labels.npy", np.zeros(4))
        np.save(tmp_path / "day_0_sparse.npy", np.array(ids, np.uint64)[:, None])
    elif form == "avazu-csv":
        path.write_bytes(avazu_csv([avazu_row(site_id=f"{number:x}") for number in ids]))
    else:
        path.write_bytes(b"".join(criteo_line(sparse=f"{number:x}") + b"\n" for number in ids))
    form = "csv" if form == "separated" else form
    has_names = form in ("csv", "parquet")
    table = {"mlperf-npz": "C1", "avazu-csv": "site_id", "criteo-tsv": "C1"}.get(form, "user")
    config = DataConfig(path=str(path), schema=str(schema), format=form)  # type: ignore[arg-type]
    for more in ("", f"[tables.{table}]\nrows = 1000\nhash = true\n"):
        schema.write_text((names if has_names else "") + more)
        source = open_source(config)
        (batch,) = read_all(LookaheadLoader(source, batch_size=4))
        place = [feature.name for feature in source.schema.features].index(table)
        raw = np.array([2**63 - 1, -(2**63), -1, 5], np.int64)
        expected = hash_ids(raw, 1000) if more else raw
        assert batch.values[place * 4 : place * 4 + 4].tolist() == expected.tolist()
    schema.write_text((names if has_names else "") + f"[tables.{table}]\nrows = {2**63 - 1}\n")
    with pytest.raises(InputError, match=f"got {2**63 - 1}"):
        read_all(LookaheadLoader(open_source(config), batch_size=4))
    skipped = read_all(LookaheadLoader(open_source(dataclasses.replace(config, bad_rows="skip")), batch_size=4))
    assert skipped[0].num_examples == 1
