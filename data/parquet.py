"""Reader of parquet and Arrow IPC files: scalar and list columns named by a schema TOML or by the file itself.

    block of a row group ──pyarrow──> Arrow table, no copy where possible ──data.arrow_columns──> Columns

Rows are numbered from 0 within their file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bagpipe.errors import InputError
from data.arrow_columns import ArrowBlock, ArrowSource
from data.arrow_files import GroupReader, embedded_schema, open_arrow
from data.column_rules import ColumnRules
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
    """

    paths: tuple[str, ...]
    rules: ColumnRules
    bad_rows: str = "stop"
    block_rows: int = BLOCK_ROWS
    form: str = "parquet"

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

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.paths, *self.rules.dictionaries)

    @property
    def in_processes(self) -> bool:
        return bool(self.rules.strings)  # pyarrow decodes outside the interpreter lock; strings are hashed inside

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
        table = reader.read(
            block.file, version, block.group, self.rules.names, start=block.start, block_rows=self.block_rows
        )
        if table.num_rows != block.stop - block.start:
            raise InputError(
                f"{block.file}: row group {block.group}: expected {block.stop} rows, "
                f"got {block.start + table.num_rows}: the file changed while it was read"
            )
        return ArrowBlock(table=table, num_raw_rows=table.num_rows)
