"""Reader of separated text with named columns, parsed by `pyarrow.csv`: comma, tab or another separator, plain or .gz.

    block of whole lines ──pyarrow.csv, types by the schema TOML──> Arrow table ──data.arrow_columns──> Columns
                     (data.csv_lines)

Label, dense columns and columns with buckets hold numbers, sparse columns integers, or texts if the schema says so. A
value cannot hold a line break: blocks end at line ends. The `[csv]` section: `data.csv_layout`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from bagpipe.errors import InputError
from data.arrow_columns import ArrowBlock, ArrowSource
from data.column_rules import ColumnRules, target_columns
from data.csv_layout import CsvLayout, split_line
from data.csv_lines import ID, parse_lines
from data.schema_file import FeatureColumn, SchemaFile, parse_schema, read_schema_file
from data.source import Block, Segment
from data.text_files import (
    BLOCK_BYTES,
    TextSource,
    first_line,
    list_files,
    locate_line,
    read_text,
    segments_of_files,
)

__all__ = ["CsvFile", "CsvSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """A file and the names of its columns."""

    path: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvSource(ArrowSource, TextSource):
    """Separated text of one schema.

    Attributes:
        parts: the data files in reading order.
        rules: of their columns.
        types: (column, Arrow type) pairs of the columns that are read.
        form: delimiter, quotes, header.
        bad_rows: stop or skip.
        block_bytes: approximate text in a block.
    """

    parts: tuple[CsvFile, ...]
    rules: ColumnRules
    types: tuple[tuple[str, pa.DataType], ...]
    form: CsvLayout
    bad_rows: str = "stop"
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def at(cls, path: str, *, schema_path: str, unlabelled: bool = False, **options: Any) -> CsvSource:
        """The source of a file or folder.

        Args:
            path: of the data.
            schema_path: of the TOML file.
            unlabelled: files may lack labels and weights.
            options: further attributes.

        Raises:
            InputError: no file, no schema, or a header without a column of the schema.
        """
        if not schema_path:
            raise InputError("data.schema is empty: csv needs a TOML file that names label, dense and sparse columns")
        found = parse_schema(schema_path, read_schema_file(schema_path))
        form = CsvLayout.of(schema_path, found.csv)
        types = _types(schema_path, found)
        paths = list_files(path)
        if unlabelled:
            there = (*_open(paths[0], form, []).names, *found.schema.dense)
            types = tuple(item for item in types if item[0] in there or item[0] not in target_columns(found.schema))
        return cls(
            parts=tuple(_open(name, form, [column for column, _ in types]) for name in paths),
            rules=ColumnRules.of(paths[0], found, pa.schema(types), unlabelled=unlabelled),
            types=types,
            form=form,
            **options,
        )

    @classmethod
    def of_lines(cls, *, schema_path: str, **options: Any) -> CsvSource:
        """The reader of lines that are in no file: of blocks that hold their text and name no file.

        Raises:
            InputError: no schema, or one that does not name the columns of the lines.
        """
        if not schema_path:
            raise InputError("data.schema is empty: csv needs a TOML file that names label, dense and sparse columns")
        found = parse_schema(schema_path, read_schema_file(schema_path))
        form = CsvLayout.of(schema_path, found.csv)
        if not form.columns or form.header:
            raise InputError(f"{schema_path}: messages have no header: csv.columns must name their columns")
        types = _types(schema_path, found)
        part = _open("", form, [column for column, _ in types])
        rules = ColumnRules.of("", found, pa.schema(types))
        return cls(parts=(part,), rules=rules, types=types, form=form, **options)

    def with_times(self) -> CsvSource:
        """See `data.clock.Clocked`."""
        assert self.clock is not None, "there is a clock"
        where = self.parts[0].path
        types = _merged(where, [*self.types, (self.clock.name, pa.int64())])
        for part in self.parts:
            _check_names(_origin(part.path, self.form), part.names, [self.clock.name], self.form)
        return dataclasses.replace(self, rules=self.rules.with_times(where, pa.schema(types)), types=types)

    @property
    def files(self) -> tuple[str, ...]:
        return (*(part.path for part in self.parts), *self.rules.dictionaries)

    @property
    def layout(self) -> str:
        return f"csv/{self.block_bytes}"

    def segments(self) -> tuple[Segment, ...]:
        return segments_of_files([part.path for part in self.parts], self.block_bytes, header=self.form.header)

    def locate(self, block: Block, row: int) -> str:
        return locate_line(block, row)

    def arrow_block(self, block: Block) -> ArrowBlock:
        part = next(part for part in self.parts if part.path == block.file)
        return parse_lines(read_text(block), part.names, dict(self.types), self.form, stops=self.bad_rows == "stop")


def _types(path: str, found: SchemaFile) -> tuple[tuple[str, pa.DataType], ...]:
    """The columns to read, each with its type."""
    uses = [(name, pa.float64()) for name in (*target_columns(found.schema), *found.schema.dense)]
    for feature in found.schema.features:
        column = found.columns.get(feature.name, FeatureColumn(name=feature.name))
        has_text = bool(column.separator) or (feature.table in found.strings and column.buckets is None)
        uses.append((column.name, pa.binary() if has_text else pa.float64() if column.buckets else ID))
        if feature.weighted:
            uses.append((found.weights[feature.name], pa.binary() if column.separator else pa.float32()))
    return _merged(path, uses)


def _merged(path: str, uses: Iterable[tuple[str, pa.DataType]]) -> tuple[tuple[str, pa.DataType], ...]:
    """The type of each column of all its uses. Raises InputError for one that is text and a number."""
    types: dict[str, pa.DataType] = {}
    for name, kind in uses:
        before = types.setdefault(name, kind)
        if (before == pa.binary()) != (kind == pa.binary()):
            raise InputError(f"{path}: column {name!r} is named as text and as a number, expected one of them")
        if before != kind:  # a number that is also an id, or two kinds of numbers
            types[name] = pa.int64() if {ID, pa.int64()} & {before, kind} else before
    return tuple(types.items())


def _open(path: str, form: CsvLayout, wanted: Sequence[str]) -> CsvFile:
    """A file with its columns. Raises InputError if a wanted one is missing or named twice."""
    names = form.columns
    if not names:
        line = first_line(path).decode("utf-8-sig", "backslashreplace").rstrip("\r\n")
        names = tuple(name.strip() for name in split_line(line, form))
    _check_names(_origin(path, form), names, wanted, form)
    return CsvFile(path=path, names=names)


def _origin(path: str, form: CsvLayout) -> str:
    """The place of a file's column names."""
    return "the schema's csv.columns" if form.columns else f"{path}:1"


def _check_names(where: str, names: tuple[str, ...], wanted: Sequence[str], form: CsvLayout) -> None:
    """Raise InputError if a wanted column is missing or named twice."""
    for name in wanted:
        if names.count(name) != 1:
            shown = form.delimiter.join(names)
            shown = shown if len(shown) <= 120 else shown[:120] + "…"
            count = "none" if name not in names else "several"
            raise InputError(f"{where}: expected a column {name!r}, got {count} in {shown!r}")
