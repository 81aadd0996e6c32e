"""Labels that the loss is not defined for are malformed rows, whatever the reader."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.types.batch import Batch
from data.columnar_writer import write_columnar
from data.loader import LookaheadLoader
from data.parquet import ParquetSource
from data.source import Source
from data.testing import assert_same_batches, check_resume, read_all
from examples.own_reader import JsonLinesSource

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
