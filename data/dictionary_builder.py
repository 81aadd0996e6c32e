"""Builds the dictionaries of a schema: one pass over the data, all strings of each table counted.

    arrow_block ──strings of the table's features, row by row──> distinct strings, counts ──┐
    distinct strings so far, in the order of their first occurrence <──merged now and then──┘──> StringDictionary file

Memory: the distinct strings of all tables, and as many again while they are merged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bagpipe.errors import InputError
from data.arrow_columns import ArrowBlock, ArrowSource
from data.arrow_numbers import flat_values
from data.bad_row_limit import BadRowLimit
from data.column_rules import ColumnRules
from data.source import Source
from data.string_dictionary import write_dictionary

__all__ = ["ORDERS", "build_dictionaries"]

#: Order of the ids: by first occurrence, or most frequent first (of equally frequent ones the earlier).
ORDERS = ("first", "frequency")

#: Distinct strings of blocks that are collected before they are merged.
_PENDING = 1 << 20


def build_dictionaries(source: Source, order: str, *, min_count: int = 1, limit: int = 0) -> dict[str, int]:
    """Write the dictionary of every table that has one.

    Args:
        source: of the data; its dictionaries need not exist.
        order: one of `ORDERS`.
        min_count: strings that occur less often are left out.
        limit: use the first so many raw rows; 0: all.

    Returns:
        path -> strings in it.

    Raises:
        InputError: the schema names no dictionary, or one exists already; bad data.
    """
    if not isinstance(source, ArrowSource) or not source.rules.dictionaries:
        raise InputError('--dictionaries: no table of the schema has strings = "dictionary"')
    rules = source.rules
    for path in rules.dictionaries:
        if os.path.exists(path):
            raise InputError(f"{path}: the dictionary exists already: remove it to build it anew")
    counts = {table: _Counts() for table, ids in rules.strings if ids.dictionary}
    for table in _tables(source, limit):
        for name, found in counts.items():
            found.add(_strings(rules, table, name))
    return {
        ids.dictionary: counts[name].write(ids.dictionary, order, min_count)
        for name, ids in rules.strings
        if ids.dictionary
    }


def _tables(source: Source, limit: int) -> Iterator[pa.Table]:
    """The rows of all blocks."""
    assert isinstance(source, ArrowSource), "checked by the caller"
    raw_rows = 0
    limits = BadRowLimit(source)
    for block in (block for segment in source.segments() for block in source.blocks(segment)):
        found: ArrowBlock = source.arrow_block(block)
        if found.problem:
            raise InputError(f"{source.locate(block, int(found.malformed[0]))}: {found.problem}")
        limits.check(block, found.num_raw_rows, found.malformed)
        used = found.num_raw_rows if not limit else min(found.num_raw_rows, limit - raw_rows)
        yield found.table.slice(0, int(np.searchsorted(found.raw_rows, used)))
        raw_rows += used
        if limit and raw_rows == limit:
            return


def _strings(rules: ColumnRules, rows: pa.Table, table: str) -> pa.Array:
    """The strings of a table's features, binary: row by row, and feature by feature within a row."""
    parts, row_of = [], []
    for feature, column in zip(rules.schema.features, rules.columns, strict=True):
        if feature.table != table or column.buckets is not None:
            continue
        lengths, array = flat_values(rows.column(column.name), column.separator)
        numbers = np.arange(rows.num_rows) if lengths is None else np.repeat(np.arange(rows.num_rows), lengths)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        parts.append(array.drop_null())
        row_of.append(numbers[valid])
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays(parts).take(pa.array(np.argsort(np.concatenate(row_of), kind="stable")))


@dataclass(slots=True)
class _Counts:
    """Distinct strings in the order of their first occurrence, and how often each occurs."""

    tables: list[pa.Table] = field(default_factory=list)
    pending: int = 0

    def add(self, strings: pa.Array) -> None:
        found = pc.value_counts(strings)
        self.tables.append(pa.table({"text": found.field("values"), "count": found.field("counts")}))
        self.pending += len(found)
        if self.pending > max(_PENDING, self.tables[0].num_rows):
            self._merge()

    def _merge(self) -> pa.Table:
        # One thread: groups come in the order in which they are first met.
        whole = pa.concat_tables(self.tables).group_by("text", use_threads=False).aggregate([("count", "sum")])
        self.tables = [whole.select(["text", "count_sum"]).rename_columns(["text", "count"])]
        self.pending = 0
        return self.tables[0]

    def write(self, path: str, order: str, min_count: int) -> int:
        """Write the dictionary file; returns the number of its strings."""
        merged = self._merge()
        counts = merged.column("count").to_numpy()
        places = np.arange(counts.size) if order == "first" else np.argsort(-counts, kind="stable")
        kept = places[counts[places] >= min_count]
        texts = merged.column("text").combine_chunks().take(pa.array(kept))
        write_dictionary(path, texts, counts[kept], int(counts.sum() - counts[kept].sum()))
        return int(kept.size)
