"""Splits Criteo's click logs and writes the same ids and numbers for both systems.

    python -m benchmarks.bars.prepare FILE.tsv[.gz] FOLDER [--min-count 10] [--split 0.7 0.1 0.2]

    day file ──in order──> train | valid | test ──┬─> ours/{train,valid,test}.parquet, ours/schema.toml
       ids, numbers                               └─> fuxictr/{train,valid,test}.npz, fuxictr/feature_map.json

A number x is log(1 + x), divided by the largest one of the training examples: between 0 and 1 there, as in Criteo_x1. A
table's id 0 stands for every string that occurs less than `min_count` times in the training examples; the
others have 1, 2, … from the most frequent on. A missing string is a string of its own. So every bag holds one id, and
tables have the same number of rows in both systems.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bagpipe.errors import InputError

__all__ = ["LABEL", "NUMBERS", "PARTS", "STRINGS", "Prepared", "prepare"]

LABEL = "label"
NUMBERS = tuple(f"I{number}" for number in range(1, 14))
STRINGS = tuple(f"C{number}" for number in range(1, 27))
PARTS = ("train", "valid", "test")

#: Arrays of the examples of a part, by column.
_Columns: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The files that `prepare` wrote.

    Attributes:
        num_examples: of each part, by its name.
        table_rows: rows of each table, by the name of its feature; the one of rare strings included.
    """

    num_examples: Mapping[str, int]
    table_rows: Mapping[str, int]


def prepare(path: Path, folder: Path, *, min_count: int, shares: Sequence[float]) -> Prepared:
    """Write both systems' files into `folder`.

    Args:
        path: Criteo's layout: label, 13 integers, 26 strings, separated by tabs; plain or .gz.
        folder: is made.
        min_count: occurrences among the training examples from which a string has a row of its own.
        shares: of the training, validation and test examples, in the order of the file.

    Raises:
        InputError: the file cannot be read in this layout, or a part is empty.
    """
    columns = _read(path)
    total = len(columns[LABEL])
    ends = [round(total * sum(shares[:number])) for number in range(len(shares) + 1)]
    bounds = dict(zip(PARTS, pairwise(ends), strict=True))
    if any(first >= last for first, last in bounds.values()):
        raise InputError(f"expected examples in each of {', '.join(PARTS)}, got {total} examples and shares {shares}")
    arrays: dict[str, NDArray[np.generic]] = {LABEL: columns[LABEL].to_numpy().astype(np.float32)}
    for name in NUMBERS:
        values = np.log1p(np.maximum(columns[name].fill_null(0).to_numpy(), 0))
        largest = values[: bounds["train"][1]].max()
        arrays[name] = (values / largest if largest else values).astype(np.float32)
    table_rows = {}
    for name in STRINGS:
        arrays[name], table_rows[name] = _ids(columns[name], bounds["train"][1], min_count)
    parts = {
        part: {name: array[first:last] for name, array in arrays.items()} for part, (first, last) in bounds.items()
    }
    for system, write in (("ours", _write_ours), ("fuxictr", _write_fuxictr)):
        (folder / system).mkdir(parents=True, exist_ok=True)
        write(folder / system, parts, table_rows)
    return Prepared(num_examples={part: last - first for part, (first, last) in bounds.items()}, table_rows=table_rows)


def _read(path: Path) -> Mapping[str, pa.ChunkedArray]:
    types = {LABEL: pa.float64(), **dict.fromkeys(NUMBERS, pa.float64()), **dict.fromkeys(STRINGS, pa.string())}
    try:
        table = pa.csv.read_csv(
            str(path),
            read_options=pa.csv.ReadOptions(column_names=list(types)),
            parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False),
            # An empty number is missing, an empty string is a string.
            convert_options=pa.csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(f"{path}: {str(error).splitlines()[0]}") from None
    return {name: table[name] for name in types}


def _ids(column: pa.ChunkedArray, num_train: int, min_count: int) -> tuple[NDArray[np.int64], int]:
    """Ids of a column, and the number of rows of its table."""
    counted = pa.Table.from_struct_array(column.slice(0, num_train).value_counts())
    kept = counted.filter(pc.greater_equal(counted["counts"], min_count))
    texts = kept.sort_by([("counts", "descending"), ("values", "ascending")])["values"].combine_chunks()
    numbers = pc.index_in(column, value_set=texts)
    return pc.add(pc.fill_null(numbers, -1), 1).to_numpy().astype(np.int64), len(texts) + 1


def _write_ours(folder: Path, parts: Mapping[str, _Columns], table_rows: Mapping[str, int]) -> None:
    for part, columns in parts.items():
        pq.write_table(pa.table(columns), folder / f"{part}.parquet")
    lines = [f'label = "{LABEL}"', f"dense = {json.dumps(NUMBERS)}", f"sparse = {json.dumps(STRINGS)}"]
    lines += [f"\n[tables.{name}]\nrows = {rows}" for name, rows in table_rows.items()]
    (folder / "schema.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_fuxictr(folder: Path, parts: Mapping[str, _Columns], table_rows: Mapping[str, int]) -> None:
    for part, columns in parts.items():
        np.savez(folder / f"{part}.npz", **columns)
    # Without `padding_idx` id 0 is a row like any other.
    features = [{name: {"source": "", "type": "numeric"}} for name in NUMBERS] + [
        {name: {"source": "", "type": "categorical", "vocab_size": table_rows[name]}} for name in STRINGS
    ]
    feature_map = {
        "dataset_id": folder.name,
        "num_fields": len(features),
        "total_features": len(NUMBERS) + sum(table_rows.values()),
        "input_length": len(features),
        "labels": [LABEL],
        "features": features,
    }
    (folder / "feature_map.json").write_text(json.dumps(feature_map, indent=1), encoding="utf-8")


def main() -> None:
    """Run the preparation of a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bars.prepare", description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--min-count", type=int, default=10)
    parser.add_argument("--split", type=float, nargs=3, default=(0.7, 0.1, 0.2), metavar="SHARE")
    options = parser.parse_args()
    try:
        print(prepare(options.path, options.folder, min_count=options.min_count, shares=options.split))
    except InputError as error:
        sys.exit(f"prepare: {error}")


if __name__ == "__main__":
    main()
