"""Reader of parquet and Arrow IPC files: scalar and list columns named by a schema TOML or by the file itself.

    block of a row group ──pyarrow──> Arrow table, no copy where possible ──data.arrow_columns──> Columns

Rows are numbered from 0 within their file.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.errors import InputError
from data.arrow_columns import ArrowBlock, ArrowSource, columns_of
from data.arrow_files import GroupReader, embedded_schema, open_arrow
from data.column_rules import ColumnRules, is_list
from data.columns import Columns
from data.next_use_mark import NextUseMark
from data.next_use_sort import FAR
from data.schema_file import SchemaFile, parse_schema, read_schema_file
from data.source import Block, Segment, file_version
from data.text_files import list_files

__all__ = ["BLOCK_ROWS", "ParquetSource"]

#: Most rows in a block: with 26 ids and 13 dense values about 24 MB of columns.
BLOCK_ROWS = 65_536

#: The reader of each thread: `ParquetSource` is a frozen record, which workers and jobs share.
_OF_THREAD = threading.local()

SUFFIXES = (".parquet", ".arrow", ".feather")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(ArrowSource):
    """Columnar files of one schema.

    Attributes:
        paths: data files in reading order.
        rules: of their columns.
        bad_rows: stop or skip.
        block_rows: most rows in a block.
        form: name of the format in `layout`.
        next_uses: of the files, if they are read too (`data.next_use_source`).
    """

    paths: tuple[str, ...]
    rules: ColumnRules
    bad_rows: str = "stop"
    block_rows: int = BLOCK_ROWS
    form: str = "parquet"
    next_uses: NextUseMark | None = None

    @classmethod
    def at(cls, path: str, **options: Any) -> ParquetSource:
        """The source of a file or folder; see `of`."""
        return cls.of(list_files(path, SUFFIXES), **options)

    @classmethod
    def of(
        cls, paths: tuple[str, ...], *, schema_path: str = "", unlabelled: bool = False, **options: Any
    ) -> ParquetSource:
        """The source of files; without a schema TOML the first file must hold its schema.

        Args:
            paths: at least one.
            schema_path: of the TOML file.
            unlabelled: files may lack labels and weights.
            options: further attributes.

        Raises:
            InputError: no schema, or a column that is missing or of an unsupported type.
        """
        first = open_arrow(paths[0])
        if schema_path:
            found: SchemaFile | None = parse_schema(schema_path, read_schema_file(schema_path))
        else:
            found = embedded_schema(paths[0], first.schema)
        if found is None:
            raise InputError(f"{paths[0]}: the file carries no schema of its own: name the columns with data.schema")
        rules = ColumnRules.of(paths[0], found, first.schema, unlabelled=unlabelled)
        return cls(paths=paths, rules=rules, **options)

    def with_times(self) -> ParquetSource:
        """See `data.clock.Clocked`."""
        rules = self.rules.with_times(self.paths[0], open_arrow(self.paths[0]).schema)
        return dataclasses.replace(self, rules=rules)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.paths, *self.rules.dictionaries)

    @property
    def in_processes(self) -> bool:
        return bool(self.rules.strings)  # pyarrow decodes outside the interpreter lock; strings are hashed inside

    @property
    def reads_by_epoch(self) -> bool:
        """`Block.epoch` chooses columns."""
        return self.next_uses is not None and self.next_uses.is_shuffled

    @property
    def layout(self) -> str:
        return f"{self.form}/{self.block_rows}"

    def segments(self) -> tuple[Segment, ...]:
        found = []
        for path in self.paths:
            file = open_arrow(path)
            self.rules.check(path, file.schema)
            for group, rows in enumerate(file.group_rows):
                found.append(Segment(file=path, start=group, stop=group + 1, num_rows=rows))
        if not sum(segment.num_rows or 0 for segment in found):
            raise InputError(f"{self.paths[0]}: the file holds no rows")
        return tuple(found)

    def blocks(self, segment: Segment) -> Iterator[Block]:
        rows = segment.num_rows or 0
        for start in range(0, rows, self.block_rows):
            stop = min(start + self.block_rows, rows)
            yield Block(file=segment.file, group=segment.start, start=start, stop=stop, num_rows=stop - start)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return segment.num_rows or 0

    def locate(self, block: Block, row: int) -> str:
        before = sum(open_arrow(block.file).group_rows[: block.group]) + block.start
        return f"{block.file}: row {before + row} (from 0)"

    def arrow_block(self, block: Block) -> ArrowBlock:
        try:
            version = file_version(block.file)
        except OSError as error:
            raise InputError(f"cannot read {block.file}: {error.strerror or error}") from None
        reader: GroupReader | None = getattr(_OF_THREAD, "reader", None)
        if reader is None:
            reader = _OF_THREAD.reader = GroupReader()
        names = (*self.rules.names, *self._next_use_columns(block))
        table = reader.read(block.file, version, block.group, names, start=block.start, block_rows=self.block_rows)
        if table.num_rows != block.stop - block.start:
            raise InputError(
                f"{block.file}: row group {block.group}: expected {block.stop} rows, "
                f"got {block.start + table.num_rows}: the file changed while it was read"
            )
        return ArrowBlock(table=table, num_raw_rows=table.num_rows)

    def read(self, block: Block) -> Columns:
        found = self.arrow_block(block)
        columns = columns_of(self.rules, found, bad_rows=self.bad_rows, locate=lambda row: self.locate(block, row))
        names = self._next_use_columns(block)
        if not names:
            return columns
        parts = [_distances(found.table.column(name)) for name in names]
        distances = np.concatenate(parts)
        if columns.bad_rows.size:  # `convert` writes none
            distances = np.full(columns.values.shape[0], FAR, dtype=np.uint32)
        if distances.shape != columns.values.shape:
            raise InputError(
                f"{block.file}: row group {block.group}: expected next uses of {columns.values.shape[0]} ids, "
                f"got {distances.shape[0]}"
            )
        return dataclasses.replace(columns, distances=distances)

    def _next_use_columns(self, block: Block) -> tuple[str, ...]:
        """The columns of next uses that a block has, by feature; none if they are not read."""
        if self.next_uses is None:
            return ()
        return tuple(self.next_uses.column(column.name, block.epoch) for column in self.rules.columns)


def _distances(column: pa.ChunkedArray) -> NDArray[np.uint32]:
    """uint32: all values of a column."""
    array = column.combine_chunks()
    array = array.flatten() if is_list(array.type) else array.drop_null() if array.null_count else array
    found: NDArray[np.uint32] = array.to_numpy(zero_copy_only=False)
    return found
