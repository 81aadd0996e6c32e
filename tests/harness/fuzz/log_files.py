"""Writes a `Log` in its format, with the schema file of its tables.

Log ──WRITERS[format]──> files of one of the format's SHAPES, schema.toml ──> flags of the data section
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as pf
import pyarrow.parquet as pq

from bagpipe.types.schema import Table
from data.avazu import COLUMNS as AVAZU_COLUMNS
from data.avazu import HEX_NAMES, INTEGER_NAMES
from data.criteo import NUM_DENSE
from tests.data.files import save_to_disk, write_examples
from tests.harness.fuzz.log import BAG_LENGTHS, Column, Examples, Log, examples

__all__ = ["FIXED_COLUMNS", "NAMED_COLUMNS", "SHAPES", "write_log"]

#: By format: how the same rows can lie on disk.
SHAPES: Mapping[str, tuple[str, ...]] = {
    "criteo-tsv": ("file", "gz", "folder"),
    "avazu-csv": ("file", "gz", "folder"),
    "movielens": ("u.data", "ratings.dat", "ratings.csv", "ratings.csv.gz"),
    "csv": ("file", "gz", "folder"),
    "huggingface": ("folder",),
    "mlperf-npz": ("multi-hot", "one-hot"),
    "parquet": ("file", "arrow", "folder"),
    "synthetic": ("drawn",),
    "tfrecord": ("file", "gz", "folder"),
}

#: Formats whose schema file names the columns of the files.
NAMED_COLUMNS = ("csv", "huggingface", "parquet", "tfrecord")

#: By format: the sparse columns that it fixes, each with a table of its name.
FIXED_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "criteo-tsv": tuple(f"C{number}" for number in range(1, 27)),
    "avazu-csv": ("hour", "weekday", *HEX_NAMES, *INTEGER_NAMES),
    "mlperf-npz": ("C1", "C2", "C3", "C4"),
    "movielens": ("user", "film", "genres"),
}

#: Numbers of the text formats have up to 16 characters, sign included.
_MAX_DECIMAL = 10**15 - 1
_GENRES = ("Action", "Comedy", "Drama", "Horror")


def write_log(log: Log, folder: Path) -> dict[str, str]:
    """Write all files of a log below a folder. Returns values of ``data.*`` keys."""
    schema = folder / "schema.toml"
    schema.write_text(_SCHEMAS.get(log.format, _table_text)(log))
    path = _WRITERS[log.format](log, folder)
    settings = {"data.format": log.format, "data.schema": str(schema)}
    return settings | ({"data.path": str(path)} if path is not None else {})


def _table_text(log: Log) -> str:
    """The tables of a schema file."""
    lines = []
    for table in log.tables:
        lines.append(f"\n[tables.{json.dumps(table.name)}]")
        values = {"rows": table.rows, "hash": table.hash or None, "dim": table.dim, "pooling": table.pooling}
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _sparse_entry(form: str, column: Column) -> str:
    more = f", weight = {json.dumps(column.name + '_weight')}" if column.weighted else ""
    more += ', separator = "|"' if form == "csv" and column.bag != "one" else ""
    return f"  {{ name = {json.dumps(column.name)}, table = {json.dumps(column.table)}{more} }},"


def _column_text(log: Log) -> str:
    """A schema file that names the columns."""
    dense = json.dumps([f"d{number}" for number in range(log.num_dense)])
    sparse = "\n".join(_sparse_entry(log.format, column) for column in log.columns)
    return f'label = "label"\ndense = {dense}\nsparse = [\n{sparse}\n]\n{_table_text(log)}'


def _synthetic_text(log: Log) -> str:
    lines = [_column_text(log), "[synthetic]", f"rows = {log.num_examples}"]
    for column in log.columns:
        table = log.table(column.table)
        bound = table.rows if table.rows is not None and not table.hash else column.vocabulary
        lines += [
            f"\n[synthetic.features.{json.dumps(column.name)}]",
            f"vocabulary = {1 if column.law == 'equal' else min(bound, column.vocabulary)}",
            f"missing = {column.missing}",
            f"bag = {(1 + BAG_LENGTHS[column.bag]) / 2}",
            'bag_law = "geometric"' if column.bag == "long" else 'bag_law = "poisson"',
        ]
    return "\n".join(lines) + "\n"


_SCHEMAS: Mapping[str, Callable[[Log], str]] = {
    **dict.fromkeys(NAMED_COLUMNS, _column_text),
    "synthetic": _synthetic_text,
}


def _synthetic(log: Log, folder: Path) -> None:
    return None


def _rows(log: Log) -> pa.Table:
    """All rows. A bad one has no label."""
    values = examples(log)
    order = _with_bad(values, log.num_examples)
    good = np.array([number for number, is_bad in order], np.int64)
    is_bad = np.array([is_bad for _, is_bad in order], np.bool_)
    columns: dict[str, pa.Array] = {"label": pa.array(values.labels[good], pa.float32(), mask=is_bad)}
    for number in range(log.num_dense):
        columns[f"d{number}"] = pa.array(values.dense[good, number])
    for column in log.columns:
        bags = [values.bags[column.name][number] for number in good]
        is_list = column.bag != "one"
        ids = bags if is_list else [bag[0] if bag else None for bag in bags]
        columns[column.name] = pa.array(ids, pa.list_(pa.int64()) if is_list else pa.int64())
        if column.weighted:
            each = [values.weights[column.name][number] for number in good]
            numbers = each if is_list else [bag[0] if bag else None for bag in each]
            columns[f"{column.name}_weight"] = pa.array(numbers, pa.list_(pa.float32()) if is_list else pa.float32())
    return pa.table(columns)


def _csv(log: Log, folder: Path) -> Path:
    def text(value: object) -> str:
        return "" if value is None else "|".join(map(text, value)) if isinstance(value, list) else str(value)

    rows = _rows(log)
    lines = [",".join(map(text, row)) for row in zip(*(column.to_pylist() for column in rows.columns), strict=True)]
    return _text_files(log, folder, "part", [",".join(rows.column_names)], lines)


def _huggingface(log: Log, folder: Path) -> Path:
    save_to_disk(_rows(log), folder / "dataset", num_shards=3, batch_rows=20)
    return folder / "dataset"


def _parquet(log: Log, folder: Path) -> Path:
    table = _rows(log)
    if log.shape == "arrow":
        path = folder / "log.arrow"
        pf.write_feather(table, str(path), compression="uncompressed", chunksize=50)
        return path
    parts = _parts(table.num_rows) if log.shape == "folder" else [(0, table.num_rows)]
    path = folder / ("days" if log.shape == "folder" else "log.parquet")
    if log.shape == "folder":
        path.mkdir()
    for number, (low, high) in enumerate(parts):
        target = path / f"day_{number + 8}.parquet" if log.shape == "folder" else path
        pq.write_table(table.slice(low, high - low), target, row_group_size=50)
    return path


def _tfrecord(log: Log, folder: Path) -> Path:
    rows = _rows(log).to_pylist()
    parts = _parts(len(rows)) if log.shape == "folder" else [(0, len(rows))]
    path = folder / ("days" if log.shape == "folder" else f"log.tfrecord{'.gz' if log.shape == 'gz' else ''}")
    if log.shape == "folder":
        path.mkdir()
    for number, (low, high) in enumerate(parts):
        write_examples(path / f"day_{number + 8}" if log.shape == "folder" else path, rows[low:high])
    return path


def _criteo(log: Log, folder: Path) -> Path:
    values = examples(log)
    rng = np.random.default_rng(log.seed + 1)

    def line(number: int) -> str:
        dense = ["" if rng.random() < 0.1 else str(int(value)) for value in rng.integers(-3, 10_000, NUM_DENSE)]
        ids = [f"{bag[0] % 2**64:x}" if bag else "" for bag in _row(log, values, number)]
        return "\t".join([str(int(values.labels[number])), *dense, *ids])

    return _text_files(log, folder, "day", [], _lines(values, log.num_examples, line))


def _avazu(log: Log, folder: Path) -> Path:
    values = examples(log, low=-_MAX_DECIMAL, high=_MAX_DECIMAL)
    names = [column.name for column in AVAZU_COLUMNS]

    def line(number: int) -> str:
        fields = [str(int(values.labels[number])), f"141021{number % 24:02d}"]
        bags = dict(zip(FIXED_COLUMNS["avazu-csv"], _row(log, values, number), strict=True))
        fields += [f"{bags[name][0] % 2**64:x}" if bags[name] else "" for name in HEX_NAMES]
        fields += [str(bags[name][0]) if bags[name] else "" for name in INTEGER_NAMES]
        return ",".join(fields)

    return _text_files(log, folder, "train", [",".join(names)], _lines(values, log.num_examples, line))


def _mlperf(log: Log, folder: Path) -> Path:
    values = examples(log)
    rng = np.random.default_rng(log.seed + 1)
    order = _with_bad(values, log.num_examples)
    good = np.array([number for number, is_bad in order], np.int64)
    labels = np.where([is_bad for _, is_bad in order], 2, values.labels[good])
    ids = np.array([[bag[0] for bag in _row(log, values, number)] for number in good]).reshape(-1, len(log.columns))
    dense = rng.standard_normal((len(order), NUM_DENSE)).astype(np.float32)
    for day, (low, high) in enumerate(_parts(len(order))):
        stem = f"{folder / 'days'}/day_{day + 9}"
        Path(stem).parent.mkdir(exist_ok=True)
        np.save(f"{stem}_dense.npy", dense[low:high])
        np.save(f"{stem}_labels.npy", labels[low:high, None])
        if log.shape == "one-hot":
            np.save(f"{stem}_sparse.npy", ids[low:high])
        else:
            bags: dict[str, Any] = {str(n): np.repeat(ids[low:high, n : n + 1], n + 1, 1) for n in range(ids.shape[1])}
            np.savez(f"{stem}_sparse_multi_hot.npz", **bags)
    return folder / "days"


def _movielens(log: Log, folder: Path) -> Path:
    values = examples(log, low=0, high=_MAX_DECIMAL)
    rng = np.random.default_rng(log.seed + 1)
    separator = {"u.data": "\t", "ratings.dat": "::"}.get(log.shape, ",")

    def line(number: int) -> str:
        user, film, *_ = _row(log, values, number)
        rating = 5 if values.labels[number] else 2
        return separator.join([str((user or [0])[0]), str((film or [0])[0]), str(rating), "978300760"])

    head = ["userId,movieId,rating,timestamp"] if separator == "," else []
    text = "\n".join([*head, *_lines(values, log.num_examples, line)]) + "\n"
    _write(folder / log.shape, text)
    films = sorted({bag[0] if bag else 0 for bag in values.bags["film"]})
    if len(log.columns) > 2:
        rows = [(film, "|".join(sorted(set(rng.choice(_GENRES, 2))))) for film in films if rng.random() < 0.9]
        if log.shape.startswith("ratings.csv"):
            lines = ["movieId,title,genres", *(f'{film},"A, film",{genres}' for film, genres in rows)]
            (folder / "movies.csv").write_text("\n".join(lines) + "\n")
        else:
            (folder / "movies.dat").write_text("".join(f"{film}::A film::{genres}\n" for film, genres in rows))
    return folder / log.shape


_WRITERS: Mapping[str, Callable[[Log, Path], Path | None]] = {
    "csv": _csv,
    "huggingface": _huggingface,
    "parquet": _parquet,
    "criteo-tsv": _criteo,
    "avazu-csv": _avazu,
    "mlperf-npz": _mlperf,
    "movielens": _movielens,
    "synthetic": _synthetic,
    "tfrecord": _tfrecord,
}


def _row(log: Log, values: Examples, number: int) -> list[list[int]]:
    return [values.bags[column.name][number] for column in log.columns]


def _with_bad(values: Examples, num_examples: int) -> list[tuple[int, bool]]:
    """Example numbers in order; before the bad positions, the neighbour's number marked as bad."""
    order: list[tuple[int, bool]] = []
    for number in range(num_examples + 1):
        order += [(min(number, num_examples - 1), True)] * values.bad.count(number)
        if number < num_examples:
            order.append((number, False))
    return order


def _lines(values: Examples, num_examples: int, line: Callable[[int], str]) -> list[str]:
    return ["not a row" if is_bad else line(number) for number, is_bad in _with_bad(values, num_examples)]


def _parts(num_rows: int) -> list[tuple[int, int]]:
    """Three parts in order, at least one row each if there are so many."""
    cuts = sorted({0, num_rows // 3, num_rows // 2, num_rows})
    return list(pairwise(cuts))


def _text_files(log: Log, folder: Path, stem: str, head: Sequence[str], lines: Sequence[str]) -> Path:
    if log.shape == "folder":
        path = folder / "days"
        path.mkdir()
        for number, (low, high) in enumerate(_parts(len(lines))):
            suffix = ".gz" if number == 1 else ""
            _write(path / f"{stem}_{number + 8}.txt{suffix}", "\n".join([*head, *lines[low:high]]) + "\n")
        return path
    path = folder / f"{stem}.txt{'.gz' if log.shape == 'gz' else ''}"
    _write(path, "\n".join([*head, *lines]) + "\n")
    return path


def _write(path: Path, text: str) -> None:
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def tables_of(columns: Sequence[Column]) -> tuple[Table, ...]:
    """Default tables of columns."""
    return tuple(Table(name=name) for name in dict.fromkeys(column.table for column in columns))
