"""Reader of TFRecord files of `tf.train.Example` messages, plain, gzip or zlib; the schema TOML names the features.

    file: length, crc of it, record, crc of it, …       numbers little-endian; crc: masked CRC-32C
    file ──one segment; walked from its start──> blocks of whole records ──data.tf_example──> Arrow table ──> Columns

The format has no index, so a file is a segment of its own. Every checksum is verified; that needs `google-crc32c`.
Records are numbered from 0 within their file.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import pyarrow as pa

from bagpipe.errors import InputError
from bagpipe.files.access import open_file
from bagpipe.files.compression import START_BYTES, compression_of, is_zlib, open_inflated
from data.arrow_columns import ArrowBlock, ArrowSource
from data.column_rules import ColumnRules, target_columns
from data.schema_file import FeatureColumn, SchemaFile, parse_schema, read_schema_file
from data.source import Block, FileVersion, Segment, file_version, version_of
from data.text_files import BLOCK_BYTES, list_files
from data.tf_example import decode_examples

__all__ = ["TfRecordSource", "masked_crc"]

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
#: A longer record is taken for damage. Records are some kilobytes.
_MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TfRecordSource(ArrowSource):
    """TFRecord files of one schema.

    Attributes:
        paths: data files in reading order.
        rules: of their columns.
        columns: names and types of the columns.
        bad_rows: stop or skip.
        block_bytes: approximate bytes in a block.
    """

    paths: tuple[str, ...]
    rules: ColumnRules
    columns: pa.Schema
    bad_rows: str = "stop"
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def at(cls, path: str, *, schema_path: str, unlabelled: bool = False, **options: Any) -> TfRecordSource:
        """The source of a file or folder.

        Args:
            path: of the data.
            schema_path: of the TOML file.
            unlabelled: records may lack labels and weights.
            options: further attributes.

        Raises:
            InputError: no file, no schema, or no package for the checksums.
        """
        masked_crc(b"")
        if not schema_path:
            raise InputError("data.schema is empty: tfrecord needs a TOML file that names label and columns")
        found = parse_schema(schema_path, read_schema_file(schema_path))
        paths = list_files(path)
        columns = _columns(schema_path, found)
        rules = ColumnRules.of(paths[0], found, columns, unlabelled=unlabelled)
        return cls(paths=paths, rules=rules, columns=columns, **options)

    def with_times(self) -> TfRecordSource:
        """See `data.clock.Clocked`."""
        assert self.clock is not None, "there is a clock"
        known = [(field.name, field.type) for field in self.columns]
        columns = _merged(self.paths[0], [*known, (self.clock.name, pa.int64())])
        return dataclasses.replace(self, rules=self.rules.with_times(self.paths[0], columns), columns=columns)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.paths, *self.rules.dictionaries)

    @property
    def in_processes(self) -> bool:
        return True

    @property
    def layout(self) -> str:
        return f"tfrecord/{self.block_bytes}"

    def segments(self) -> tuple[Segment, ...]:
        for path in self.paths:
            if version_of(path).num_bytes == 0:
                raise InputError(f"{path}: the file is empty, expected records")
        return tuple(Segment(file=path, start=0, stop=0) for path in self.paths)

    def blocks(self, segment: Segment) -> Iterator[Block]:
        first, parts, size = 0, list[bytes](), 0
        for record in _records(segment.file):
            parts.append(record)
            size += len(record)
            if size >= self.block_bytes:
                yield _block(segment.file, first, parts)
                first, parts, size = first + len(parts), [], 0
        if parts:
            yield _block(segment.file, first, parts)

    def count_rows(self, segment: Segment, at_most: int | None = None) -> int:
        return _count(segment.file, at_most, file_version(segment.file))

    def locate(self, block: Block, row: int) -> str:
        return f"{block.file}: record {block.start + row} (from 0)"

    def arrow_block(self, block: Block) -> ArrowBlock:
        assert block.payload is not None, "blocks of records carry them"
        return decode_examples(_split(block), self.columns, stops=self.bad_rows == "stop")


def _columns(path: str, found: SchemaFile) -> pa.Schema:
    """The columns to read, each with its type. A sparse feature is a list of any length."""
    uses = [(name, pa.float64()) for name in (*target_columns(found.schema), *found.schema.dense)]
    for feature in found.schema.features:
        column = found.columns.get(feature.name, FeatureColumn(name=feature.name))
        if column.separator:
            raise InputError(f"{path}: column {column.name!r}: separator is for text, features of records are lists")
        ids = pa.list_(pa.binary() if feature.table in found.strings else pa.int64())
        uses.append((column.name, pa.float64() if column.buckets else ids))
        if feature.weighted:
            uses.append((found.weights[feature.name], pa.list_(pa.float32())))
    return _merged(path, uses)


def _merged(path: str, uses: Iterable[tuple[str, pa.DataType]]) -> pa.Schema:
    """The columns of all uses. Raises InputError for one that is used as two types."""
    types: dict[str, pa.DataType] = {}
    for name, kind in uses:
        if types.setdefault(name, kind) != kind:
            raise InputError(f"{path}: column {name!r} is named as {types[name]} and as {kind}, expected one of them")
    return pa.schema(types.items())


def masked_crc(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, rotated right by 15 bits, plus a constant.

    Raises:
        InputError: the package is not installed.
    """
    crc = _crc_function()(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@lru_cache(maxsize=1)
def _crc_function() -> Callable[[bytes], int]:
    try:
        from google_crc32c import value
    except ModuleNotFoundError:
        raise InputError(
            "data.format tfrecord needs the Python package google-crc32c, which is not installed: "
            "pip install google-crc32c"
        ) from None
    function: Callable[[bytes], int] = value
    return function


def _records(path: str) -> Iterator[bytes]:
    """The records of a file with the checksum that follows each. Lengths are verified, contents are not yet."""
    number = 0
    try:
        with open_file(path) as file:
            stream = _content(path, file)
            while (record := _next_record(stream, f"{path}: record {number} (from 0)")) is not None:
                yield record
                number += 1
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    if not number:
        raise InputError(f"{path}: the file is empty, expected records")


def _content(path: str, file: BinaryIO) -> BinaryIO:
    """The records of a file; of one that is compressed as TensorFlow's writers do, GZIP or ZLIB, whatever its name."""
    start = file.read(START_BYTES)
    file.seek(0)
    if len(start) < _HEADER.size or masked_crc(start[:8]) == _HEADER.unpack(start)[1]:
        return file
    kind = compression_of(start) or ("zlib" if is_zlib(start) else "")
    if kind not in ("", "gzip", "zlib"):
        raise InputError(
            f"{path}: expected records, plain or compressed by gzip or zlib, got a file compressed by {kind}"
        )
    return open_inflated(file, kind) if kind else file


def _next_record(stream: BinaryIO, where: str) -> bytes | None:
    """The next record and its checksum; None at the end of the file."""
    try:
        return _whole_record(stream)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _whole_record(stream: BinaryIO) -> bytes | None:
    header = stream.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise InputError(f"expected {_HEADER.size} bytes of length and checksum, got {len(header)}")
    length, crc = _HEADER.unpack(header)
    if masked_crc(header[:8]) != crc or length > _MAX_RECORD_BYTES:
        raise InputError("the checksum of its length is wrong: no TFRecord file, or a damaged one")
    record = stream.read(length + _CRC.size)
    if len(record) != length + _CRC.size:
        raise InputError(f"expected {length + _CRC.size} bytes, got {len(record)}: the file is cut short")
    return record


def _block(path: str, first: int, parts: list[bytes]) -> Block:
    """A block that carries records: their number in `start`, and `payload` with a length before each."""
    payload = b"".join(piece for part in parts for piece in (_CRC.pack(len(part)), part))
    return Block(file=path, start=first, stop=first + len(parts), num_rows=len(parts), payload=payload)


def _split(block: Block) -> Iterator[bytes]:
    """The records of a block. Raises InputError for one whose checksum is wrong."""
    payload, place = block.payload or b"", 0
    for number in range(block.start, block.stop):
        (size,) = _CRC.unpack_from(payload, place)
        end = place + _CRC.size + size
        record = payload[place + _CRC.size : end - _CRC.size]
        if masked_crc(record) != _CRC.unpack_from(payload, end - _CRC.size)[0]:
            raise InputError(f"{block.file}: record {number} (from 0): its checksum is wrong: the file is damaged")
        yield record
        place = end


@lru_cache(maxsize=4096)
def _count(path: str, at_most: int | None, version: FileVersion) -> int:
    del version  # part of the cache key only
    count = 0
    for _ in _records(path):
        count += 1
        if at_most is not None and count >= at_most:
            break
    return count
