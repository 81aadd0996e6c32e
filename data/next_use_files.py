"""`PlainFiles`: the ids of the columnar files to annotate, by table, in the order of training.

    block ──rows──> columns of ids ──uses──> by table: ids, examples ──NextUseSort──> distances ──by feature──> columns

The files are read, not mapped, so that their pages do not count as memory of the program. Each thread has its own
reader of the file that it read last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bagpipe.types.schema import DataSchema
from data.next_use_sort import FAR, NextUseSort
from data.parquet import ParquetSource
from data.source import Block

__all__ = ["PlainFiles", "Uses"]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The ids of some rows.

    Attributes:
        tables: by table, ids and the example of each, in the order of the examples.
        order: by table, which occurrences these are; None: all in order.
        lengths: by feature, int32 per row.
    """

    tables: list[tuple[NDArray[np.int64], NDArray[np.uint32]]]
    order: list[NDArray[np.int64] | None]
    lengths: list[NDArray[np.int32]]


class PlainFiles:
    """Arrow files of `write_columnar`, all of one schema.

    Args:
        paths: at least one, in reading order.

    Attributes:
        source: of the files.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.source = ParquetSource.of(tuple(paths))
        self._of_thread = threading.local()

    @property
    def schema(self) -> DataSchema:
        return self.source.schema

    @property
    def names(self) -> list[str]:
        """Of the id columns, by feature."""
        return [column.name for column in self.source.rules.columns]

    def reader(self, path: str, *, only_ids: bool = False) -> pa.ipc.RecordBatchFileReader:
        """The calling thread's reader of a file."""
        key, reader = getattr(self._of_thread, "opened", (None, None))
        if key != (path, only_ids):
            options = None
            if only_ids:
                names = pa.ipc.open_file(pa.OSFile(os.fsencode(path))).schema.names
                ids = {*self.names}
                places = [place for place, name in enumerate(names) if name in ids]
                options = pa.ipc.IpcReadOptions(included_fields=places)
            reader = pa.ipc.open_file(pa.OSFile(os.fsencode(path)), options=options)
            self._of_thread.opened = (path, only_ids), reader
        return reader

    def rows(self, block: Block) -> pa.RecordBatch:
        """The ids of a block."""
        return self.reader(block.file, only_ids=True).get_batch(block.group).slice(block.start, block.num_rows)

    def count_ids(self) -> list[int]:
        """By table: its ids in all files. Reads the files' descriptions of their batches alone."""
        counts = dict.fromkeys((table.name for table in self.schema.tables), 0)
        for path in self.source.paths:
            reader = pa.ipc.open_file(pa.memory_map(os.fsencode(path)))
            for group in range(reader.num_record_batches):
                rows = reader.get_batch(group)
                for feature, name in zip(self.schema.features, self.names, strict=True):
                    counts[feature.table] += _num_ids(rows.column(name))
        return list(counts.values())

    def uses(self, rows: pa.RecordBatch, positions: NDArray[np.int64] | None) -> Uses:
        """The ids of rows by table.

        Args:
            rows: at most 65,536.
            positions: of each row among the examples, -1 for those left out; None: all in order.
        """
        ids = [_flat(rows.column(name)).to_numpy(zero_copy_only=False) for name in self.names]
        lengths = [_lengths(rows.column(name)) for name in self.names]
        tables: list[tuple[NDArray[np.int64], NDArray[np.uint32]]] = []
        orders: list[NDArray[np.int64] | None] = []
        every_row = np.arange(rows.num_rows, dtype=np.uint32)
        for own in self._features_of_tables():
            if not own:
                tables.append((np.empty(0, dtype=np.int64), np.empty(0, dtype=np.uint32)))
                orders.append(None)
                continue
            of_ids = np.concatenate([ids[number] for number in own]) if len(own) > 1 else ids[own[0]]
            of_features = [_repeated(every_row, lengths[number], ids[number].shape[0]) for number in own]
            examples = np.concatenate(of_features) if len(own) > 1 else of_features[0]
            order = None
            if positions is not None or len(own) > 1:
                at = examples.astype(np.int64) if positions is None else positions.take(examples)
                # Positions within a block have 16 bits, so the sort is a radix sort.
                served = np.flatnonzero(at >= 0)
                order = served.take(np.argsort(at.take(served).astype(np.uint16), kind="stable"))
                of_ids, examples = of_ids.take(order), at.take(order).astype(np.uint32)
            tables.append((np.ascontiguousarray(of_ids), examples))
            orders.append(order)
        return Uses(tables, orders, lengths)

    def distances(self, uses: Uses, number: int | None, sort: NextUseSort) -> list[NDArray[np.uint32]]:
        """By feature, uint32: the distances of its ids; `FAR` where rows are left out.

        Args:
            uses: of a block.
            number: of the block in the sort; None: all its rows are left out.
            sort: solved.
        """
        by_table = [] if number is None else sort.distances(number, uses.tables)
        by_feature: dict[int, NDArray[np.uint32]] = {}
        for table, own in enumerate(self._features_of_tables()):
            sizes = [int(uses.lengths[place].sum()) for place in own]
            found = np.full(sum(sizes), FAR, dtype=np.uint32)
            if number is not None:
                order = uses.order[table]
                found[slice(None) if order is None else order] = by_table[table]
            for place, piece in zip(own, np.split(found, np.cumsum(sizes)[:-1]) if own else [], strict=True):
                by_feature[place] = piece
        return [by_feature[place] for place in range(len(self.names))]

    def _features_of_tables(self) -> list[list[int]]:
        features = [*enumerate(self.schema.features)]
        return [[number for number, feature in features if feature.table == table.name] for table in self.schema.tables]


def _flat(column: pa.Array) -> pa.Array:
    """All ids of a column."""
    if isinstance(column, pa.ListArray):
        return column.flatten()
    return column.drop_null() if column.null_count else column


def _repeated(rows: NDArray[np.uint32], lengths: NDArray[np.int32], num_ids: int) -> NDArray[np.uint32]:
    """The row of each id."""
    has_one_each = num_ids == rows.shape[0] and bool((lengths == 1).all())
    return rows if has_one_each else rows.repeat(lengths)


def _num_ids(column: pa.Array) -> int:
    """Ids of a column. Of lists, which are never null, only the first and the last place are read."""
    if isinstance(column, pa.ListArray):
        places = column.offsets
        return int(places[-1].as_py()) - int(places[0].as_py())
    return len(column) - int(column.null_count)


def _lengths(column: pa.Array) -> NDArray[np.int32]:
    """int32: ids in each row."""
    if isinstance(column, pa.ListArray):
        found = pc.list_value_length(column).fill_null(0)
    elif column.null_count:
        found = column.is_valid()
    else:
        return np.ones(len(column), dtype=np.int32)
    lengths: NDArray[np.int32] = found.to_numpy(zero_copy_only=False).astype(np.int32)
    return lengths
