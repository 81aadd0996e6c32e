"""Reader of parquet and Arrow IPC files: scalar and list columns named by a schema TOML or by the file itself.

    block of a row group ──pyarrow──> Arrow table, no copy where possible ──data.arrow_columns──> Columns
    folders KEY=VALUE of the file ──data.partitions──> columns that the file does not have itself ──^

Of a folder, files are read that parquet or Arrow wrote, whatever their names. Rows are numbered from 0 within their
file.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.files.access import is_remote
from bagpipe.files.data_folder import look_at, shown_names, tell_left_out
from data.arrow_columns import ArrowBlock, ArrowSource, columns_of
from data.arrow_files import GroupReader, embedded_schema, is_columnar, open_arrow
from data.arrow_numbers import is_list
from data.column_rules import ColumnRules
from data.columns import Columns
from data.next_use_mark import NextUseMark
from data.next_use_sort import FAR
from data.partitions import Partitions
from data.schema_file import SchemaFile, parse_schema, read_schema_file
from data.source import Block, FileVersion, Segment, version_of
from data.text_files import list_files

__all__ = ["BLOCK_ROWS", "ParquetSource"]

#: Most rows in a block: with 26 ids and 13 dense values about 24 MB of columns.
BLOCK_ROWS = 65_536

#: The reader of each thread: `ParquetSource` is a frozen record, which workers and jobs share.
_OF_THREAD = threading.local()

#: Ends of the names of columnar files, in small letters. Files of other names show by their first bytes what they are.
SUFFIXES = (".parquet", ".pq", ".arrow", ".feather")

_NO_PARTITIONS = Partitions()

_LOG = logging.getLogger("bagpipe.data")


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
        partitions: the columns of the files' folders.
    """

    paths: tuple[str, ...]
    rules: ColumnRules
    bad_rows: str = "stop"
    block_rows: int = BLOCK_ROWS
    form: str = "parquet"
    next_uses: NextUseMark | None = None
    partitions: Partitions = _NO_PARTITIONS

    @classmethod
    def at(cls, path: str, *, schema_path: str = "", **options: Any) -> ParquetSource:
        """The source of a file, or of the columnar files of a folder; see `of`.

        Raises:
            InputError: as `of` and `data.text_files.list_files`, or the folder has no such file.
        """
        paths = list_files(path)
        columnar = paths if paths == (path,) else _columnar(path, paths)
        source = cls.of(columnar, schema_path=schema_path, partitions=Partitions.of(columnar), **options)
        known = {*columnar, *map(os.path.realpath, (schema_path, *source.rules.dictionaries))}
        unused = [name for name in paths if name not in known and os.path.realpath(name) not in known]
        names = [name.removeprefix(path).lstrip("/") for name in unused]
        tell_left_out(path, names, "neither parquet nor Arrow by their first bytes")
        return source

    @classmethod
    def of(
        cls,
        paths: tuple[str, ...],
        *,
        schema_path: str = "",
        unlabelled: bool = False,
        partitions: Partitions = _NO_PARTITIONS,
        **options: Any,
    ) -> ParquetSource:
        """The source of files; without a schema TOML the first file must hold its schema.

        Args:
            paths: at least one.
            schema_path: of the TOML file.
            partitions: of the paths.
            unlabelled: files may lack labels and weights.
            options: further attributes.

        Raises:
            InputError: no schema, or a column that is missing or of an unsupported type.
        """
        first = open_arrow(paths[0])
        own = embedded_schema(paths[0], first.schema)
        if not schema_path:
            if own is None:
                raise InputError(
                    f"{paths[0]}: the file carries no schema of its own: name the columns with data.schema"
                )
            partitions = partitions.with_texts(_string_columns(own))
            schema = partitions.added_to(paths[0], first.schema)
            rules = ColumnRules.of(paths[0], own, schema, unlabelled=unlabelled)
            return cls(paths=paths, rules=rules, partitions=partitions, **options)
        try:
            given = parse_schema(schema_path, read_schema_file(schema_path))
            partitions = partitions.with_texts(_string_columns(given))
            schema = partitions.added_to(paths[0], first.schema)
            rules = ColumnRules.of(paths[0], given, schema, unlabelled=unlabelled)
        except InputError as error:
            raise (
                error if own is None else InputError(f"{error} ({_carries_its_own(paths[0], schema_path)})")
            ) from None
        if own is not None and own.schema != given.schema:
            _LOG.warning("%s", _carries_its_own(paths[0], schema_path))
        return cls(paths=paths, rules=rules, partitions=partitions, **options)

    def with_times(self) -> ParquetSource:
        """See `data.clock.Clocked`."""
        schema = self.partitions.added_to(self.paths[0], open_arrow(self.paths[0]).schema)
        return dataclasses.replace(self, rules=self.rules.with_times(self.paths[0], schema))

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.paths, *self.rules.dictionaries)

    @property
    def multi_hot(self) -> frozenset[str]:
        """Features with a list column in one of the files at least. Opens all of them."""
        lists = _list_columns(self.paths, tuple(map(version_of, self.paths)))
        pairs = zip(self.schema.features, self.rules.columns, strict=True)
        return self.rules.multi_hot | {feature.name for feature, column in pairs if column.name in lists}

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
            self.rules.check(path, self.partitions.added_to(path, file.schema))
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
        version = version_of(block.file)
        reader: GroupReader | None = getattr(_OF_THREAD, "reader", None)
        if reader is None:
            reader = _OF_THREAD.reader = GroupReader()
        names = (*self.rules.names, *self._next_use_columns(block))
        named = self._partition_columns(block.file, version, names)
        names = tuple(name for name in names if name not in named)
        table = reader.read(block.file, version, block.group, names, start=block.start, block_rows=self.block_rows)
        if table.num_rows != block.stop - block.start:
            raise InputError(
                f"{block.file}: row group {block.group}: expected {block.stop} rows, "
                f"got {block.start + table.num_rows}: the file changed while it was read"
            )
        for name in named:
            table = table.append_column(name, self.partitions.column(block.file, name, table.num_rows))
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

    def _partition_columns(self, path: str, version: FileVersion, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the columns that a file has of its folders."""
        wanted = [name for name, _ in self.partitions.types if name in names]
        return tuple(name for name in wanted if name not in _stored(path, version)) if wanted else ()

    def _next_use_columns(self, block: Block) -> tuple[str, ...]:
        """The columns of next uses that a block has, by feature; none if they are not read."""
        if self.next_uses is None:
            return ()
        return tuple(self.next_uses.column(column.name, block.epoch) for column in self.rules.columns)


@lru_cache(maxsize=8)
def _list_columns(paths: tuple[str, ...], versions: tuple[FileVersion, ...]) -> frozenset[str]:
    """Names of the columns that hold lists in one of the files at least."""
    del versions  # part of the cache key only
    return frozenset(field.name for path in paths for field in open_arrow(path).schema if is_list(field.type))


@lru_cache(maxsize=4096)
def _stored(path: str, version: FileVersion) -> frozenset[str]:
    """Names of a file's own columns."""
    del version  # part of the cache key only
    return frozenset(open_arrow(path).schema.names)


def _string_columns(found: SchemaFile) -> set[str]:
    """Names of the columns whose strings are ids."""
    features = ((feature, found.columns.get(feature.name)) for feature in found.schema.features)
    return {
        column.name if column else feature.name
        for feature, column in features
        if feature.table in found.strings and not (column and column.buckets)
    }


def _columnar(folder: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a folder's files that are columnar.

    Raises:
        InputError: none is, or a file cannot be read.
    """
    others = [path for path in paths if not path.lower().endswith(SUFFIXES)]
    found = look_at(is_columnar, others, at_once=is_remote(folder))
    unlike = {path for path, fits in zip(others, found, strict=True) if not fits}
    if len(unlike) == len(paths):
        names = ", ".join(path.rpartition("/")[2] for path in paths[:5])
        raise InputError(f"{folder}: the folder holds no parquet or Arrow file, got {names}")
    if len(others) < len(paths) and (odd := [path for path in others if path not in unlike]):
        names = shown_names([path.removeprefix(folder).lstrip("/") for path in odd])
        _LOG.warning("%s: read too, as they begin like Parquet or Arrow files: %s", folder, names)
    return tuple(path for path in paths if path not in unlike)


def _carries_its_own(path: str, schema_path: str) -> str:
    """The message for a file with a schema of its own that is read with another one."""
    return (
        f"{path} carries its own schema, that of its conversion, in which strings and hashed ids are numbers; "
        f"data.schema {schema_path} is read in its place: leave it out, unless it is for this file"
    )


def _distances(column: pa.ChunkedArray) -> NDArray[np.uint32]:
    """uint32: all values of a column."""
    array = column.combine_chunks()
    array = array.flatten() if is_list(array.type) else array.drop_null() if array.null_count else array
    found: NDArray[np.uint32] = array.to_numpy(zero_copy_only=False)
    return found
