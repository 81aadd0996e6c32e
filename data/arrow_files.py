"""One interface to parquet and Arrow files: the rows of each row group, and reading a group block by block.

The first bytes tell parquet, Arrow's file format and Arrow's stream format apart. Arrow takes paths as bytes: names of
files need not be UTF-8. A file written by
`python -m data convert` holds its schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from bagpipe.errors import InputError
from bagpipe.files.access import is_remote, open_file
from bagpipe.files.compression import START_BYTES, compression_of
from bagpipe.types.schema import DataSchema
from bagpipe.util.documents import parse_json
from data.clock import Clock
from data.schema_file import SchemaFile
from data.source import FileVersion, file_version

__all__ = ["SCHEMA_KEY", "ArrowFile", "GroupReader", "embed_schema", "embedded_schema", "is_columnar", "open_arrow"]

#: Key of the embedded schema in a file's metadata, and the version of its layout.
SCHEMA_KEY = b"bagpipe.data_schema"
SCHEMA_VERSION = 1

#: Least rows of a group of a stream, but for the last: its record batches are small, often 1,000 rows.
GROUP_ROWS = 65_536


class ArrowFile(Protocol):
    """An open columnar file. `schema` is Arrow's."""

    schema: pa.Schema

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each group."""
        ...

    def blocks(self, group: int, columns: list[str], block_rows: int) -> Iterator[pa.Table]:
        """The rows of a group in order, `block_rows` at a time; the last block may have fewer."""
        ...


class ParquetFile:
    """A parquet file; a group is a row group. Pages that carry a checksum are verified when read.

    A group is decoded block by block: a few bytes can stand for a hundred million equal values.
    """

    def __init__(self, path: str) -> None:
        # pre_buffer: the pages of a remote row group in few requests.
        source = open_file(path) if is_remote(path) else pa.OSFile(os.fsencode(path))
        self._file = pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=is_remote(path))
        self.schema: pa.Schema = self._file.schema_arrow
        metadata = self._file.metadata
        self.group_rows = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))

    def blocks(self, group: int, columns: list[str], block_rows: int) -> Iterator[pa.Table]:
        """See `ArrowFile.blocks`."""
        batches = self._file.iter_batches(block_rows, row_groups=[group], columns=columns, use_threads=False)
        for batch in batches:
            yield pa.Table.from_batches([batch])


class IpcFile:
    """An Arrow IPC file, memory-mapped if it is local; a group is a record batch. The format has no checksums."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._reader = _open_ipc(path)
        self.schema: pa.Schema = self._reader.schema

    @property
    def group_rows(self) -> tuple[int, ...]:
        """See `ArrowFile`."""
        if is_remote(self._path):
            return _remote_group_rows(self._path, file_version(self._path))
        return _group_rows(self._reader)

    def blocks(self, group: int, columns: list[str], block_rows: int) -> Iterator[pa.Table]:
        """See `ArrowFile.blocks`."""
        reader = self._reader
        if is_remote(self._path):
            places = sorted(self.schema.get_field_index(name) for name in columns)
            reader = _open_ipc(self._path, pa.ipc.IpcReadOptions(included_fields=places))
        return _slices(pa.Table.from_batches([reader.get_batch(group)]).select(columns), block_rows)


def _open_ipc(path: str, options: pa.ipc.IpcReadOptions | None = None) -> pa.ipc.RecordBatchFileReader:
    source = pa.PythonFile(open_file(path), "r") if is_remote(path) else pa.memory_map(os.fsencode(path))
    return pa.ipc.open_file(source, options=options)


def _group_rows(reader: pa.ipc.RecordBatchFileReader) -> tuple[int, ...]:
    return tuple(reader.get_batch(group).num_rows for group in range(reader.num_record_batches))


@lru_cache(maxsize=4096)
def _remote_group_rows(path: str, version: FileVersion) -> tuple[int, ...]:
    """The format has no index of rows: reads one column of each record batch."""
    del version  # part of the cache key only
    return _group_rows(_open_ipc(path, pa.ipc.IpcReadOptions(included_fields=[0])))


class StreamFile:
    """A file of Arrow's stream format, memory-mapped; a group is a run of record batches. There are no checksums.

    The format has no index, so opening walks over the headers of all record batches, once for a file.
    """

    def __init__(self, path: str) -> None:
        if is_remote(path):
            raise InputError(f"{path}: files of Arrow's stream format have no index: copy it, or convert it to parquet")
        with open(path, "rb") as stream:
            stream.seek(-min(len(_STREAM_END), os.path.getsize(path)), os.SEEK_END)
            if stream.read() != _STREAM_END:
                raise pa.ArrowInvalid("the stream has no end")
        self.schema, self._groups = _stream_groups(path, file_version(path))
        self.group_rows = tuple(sum(batch.num_rows for batch in group) for group in self._groups)

    def blocks(self, group: int, columns: list[str], block_rows: int) -> Iterator[pa.Table]:
        """See `ArrowFile.blocks`."""
        if group >= len(self._groups):
            raise ValueError(f"there is no row group {group}")
        return _slices(pa.Table.from_batches(self._groups[group], self.schema).select(columns), block_rows)


def _slices(table: pa.Table, block_rows: int) -> Iterator[pa.Table]:
    for start in range(0, table.num_rows, block_rows):
        yield table.slice(start, block_rows)


#: The last bytes of a stream: a continuation mark, and a message of no bytes.
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@lru_cache(maxsize=64)
def _stream_groups(path: str, version: FileVersion) -> tuple[pa.Schema, tuple[tuple[pa.RecordBatch, ...], ...]]:
    """The record batches of a stream, in runs of at least `GROUP_ROWS` rows. They refer to the mapped file."""
    del version  # part of the cache key only
    groups: list[tuple[pa.RecordBatch, ...]] = []
    run: list[pa.RecordBatch] = []
    reader = pa.ipc.open_stream(pa.memory_map(os.fsencode(path)))
    for batch in reader:
        run.append(batch)
        if sum(item.num_rows for item in run) >= GROUP_ROWS:
            groups.append(tuple(run))
            run = []
    return reader.schema, (*groups, *([tuple(run)] if run else []))


_OPENERS: Mapping[bytes, Callable[[str], ArrowFile]] = {
    b"PAR1": ParquetFile,
    b"ARRO": IpcFile,
    b"\xff\xff\xff\xff": StreamFile,
}


def is_columnar(path: str) -> bool:
    """Whether a file begins as parquet or Arrow IPC does.

    Raises:
        InputError: it cannot be read.
    """
    return _magic_of(path)[:4] in _OPENERS


def _magic_of(path: str) -> bytes:
    try:
        with open_file(path) as stream:
            return stream.read(START_BYTES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def open_arrow(path: str) -> ArrowFile:
    """Open a columnar file.

    Raises:
        InputError: missing, empty, truncated, or neither parquet nor Arrow IPC.
    """
    magic = _magic_of(path)
    if not magic:
        raise InputError(f"{path}: the file is empty, expected parquet or Arrow IPC")
    opener = _OPENERS.get(magic[:4])
    if opener is None:
        kind = compression_of(magic)
        got = f"a file compressed by {kind}" if kind else f"one that begins with {magic[:4]!r}"
        raise InputError(f"{path}: expected a parquet or Arrow IPC file, got {got}")
    try:
        return opener(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: damaged or cut short: {_one_line(error)}") from None


class GroupReader:
    """Reads blocks of row groups. The file and the group read last stay open: blocks are mostly read in order.

    One thread's. A block behind the last one read starts the group again.
    """

    def __init__(self) -> None:
        self._opened: tuple[str, FileVersion] | None = None
        self._file: ArrowFile | None = None
        self._key: tuple[object, ...] = ()
        self._blocks: Iterator[pa.Table] = iter(())
        self._next_row = 0

    def read(
        self, path: str, version: FileVersion, group: int, columns: tuple[str, ...], *, start: int, block_rows: int
    ) -> pa.Table:
        """A block: `block_rows` rows of a group from `start` on, or those that are left.

        Args:
            path: of the file.
            version: of the file.
            group: number of the group.
            columns: names.
            start: first row of the block in the group, a multiple of `block_rows`.
            block_rows: most rows of a block.

        Raises:
            InputError: the group is damaged or gone.
        """
        key = (path, version, group, columns, block_rows)
        try:
            if key != self._key or start < self._next_row:
                if self._file is None or self._opened != (path, version):
                    self._file, self._opened = open_arrow(path), (path, version)
                self._blocks = self._file.blocks(group, list(columns), block_rows)
                self._key, self._next_row = key, 0
            while True:
                block = next(self._blocks, None)
                at, self._next_row = self._next_row, self._next_row + block_rows
                if block is None:
                    raise ValueError(f"it has no row {start}")
                if at == start:
                    return block
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: the group does not exist (any more)
            self._key, self._file = (), None
            raise InputError(f"{path}: row group {group} is damaged: {_one_line(error)}") from None
        except BaseException:
            self._key, self._file = (), None
            raise


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def embed_schema(file: SchemaFile) -> dict[bytes, bytes]:
    """File metadata that holds the schema of a columnar file."""
    value = {"version": SCHEMA_VERSION, "schema": file.schema.to_json(), "weights": dict(file.weights)}
    if file.clock is not None:
        value["time"] = file.clock.name
    return {SCHEMA_KEY: json.dumps(value, sort_keys=True).encode()}


def embedded_schema(path: str, schema: pa.Schema) -> SchemaFile | None:
    """The schema in a file's metadata, or None.

    Raises:
        InputError: it is damaged or of another version.
    """
    text = (schema.metadata or {}).get(SCHEMA_KEY)
    if text is None:
        return None
    try:
        value: dict[str, Any] = parse_json(text)
        if value["version"] != SCHEMA_VERSION:
            raise InputError(f"{path}: expected schema version {SCHEMA_VERSION}, got {value['version']!r}")
        found = DataSchema.from_json(value["schema"], f"{path}: the schema in the file's metadata")
        clock = Clock(name=str(value["time"])) if "time" in value else None
        return SchemaFile(schema=found, weights=value["weights"], clock=clock)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: the schema in the file's metadata is damaged: {_one_line(error)}") from None
