"""Row file format: an .npy of records (id, table, step, row), sorted by (table, id), each row once.

    offset 0   id     int64     8 B
           8   table  uint32    4 B    table number of the schema
          12   step   uint32    4 B    batch for which the row was evicted
          16   row    words of the table [row_width], then zeros up to a multiple of 8 B

A file has the rows of all tables whose records have one size. If their words differ, its rows are words of
2 B (`file_dtype`). A file of deletions has records without a row; their step is the batch before which the row expired.

A reader compares the header with the expected bytes and maps the rest; it never parses a header. `numpy.load` reads the
files too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from bagpipe.checkpoint.files import create_plain, finish
from bagpipe.checkpoint.manifest import BrokenCheckpoint, FileEntry
from bagpipe.types.schema import ROW_TYPES, RowSchema

__all__ = [
    "DELETION_DTYPE",
    "MAX_STEP",
    "NAME_DTYPE",
    "RecordFile",
    "close_quietly",
    "file_dtype",
    "join_records",
    "latest_positions",
    "load_names",
    "map_records",
    "names_in",
    "record_dtype",
    "save_names",
    "take_records",
    "words_as",
]

MAX_STEP = (1 << 32) - 1
_HEAD_BYTES = 16

#: A deletion: the first fields of a row's record.
DELETION_DTYPE = np.dtype([("id", "<i8"), ("table", "<u4"), ("step", "<u4")])

#: A row's name: table and id.
NAME_DTYPE = np.dtype([("table", "<u4"), ("id", "<i8")])


def record_dtype(row_bytes: int, dtype: str) -> np.dtype[np.void]:
    """Record dtype for rows of `row_bytes` bytes of a `RowSchema.dtype`. Aligned fields: ids are searched in place."""
    row_type = ROW_TYPES[dtype]
    width = row_bytes // row_type.word_bytes
    element = np.dtype(row_type.word)
    return np.dtype(
        {
            "names": ["id", "table", "step", "row"],
            "formats": ["<i8", "<u4", "<u4", (element, (width,))],
            "offsets": [0, 8, 12, _HEAD_BYTES],
            "itemsize": _HEAD_BYTES + -(-row_bytes // 8) * 8,
        }
    )


def file_dtype(schema: RowSchema, row_bytes: int) -> np.dtype[np.void]:
    """Record dtype of the file of the tables with rows of `row_bytes` bytes; 0: of deletions.

    Their rows are `words_as` this dtype's words: those of the tables if they agree, otherwise uint16, as raw bits.
    """
    if not row_bytes:
        return DELETION_DTYPE
    dtypes = {schema.dtype_of(table) for table in range(len(schema.tables)) if schema.row_bytes(table) == row_bytes}
    narrowest = min(sorted(dtypes), key=lambda dtype: ROW_TYPES[dtype].word_bytes, default=schema.dtype)
    return record_dtype(row_bytes, narrowest)


def words_as(rows: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows ``[n, width]`` as words of another size, with the same bytes. The words of a row are contiguous."""
    return rows if rows.dtype == dtype else rows.view(dtype)


class RecordFile:
    """Context manager that writes an .npy file of records: durable after a clean exit, removed after an error."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self.num_records = 0
        self._file: BinaryIO | None = None
        self._entry: FileEntry | None = None

    @property
    def entry(self) -> FileEntry:
        """Name, length and checksum; after a clean exit."""
        assert self._entry is not None, "the file is not finished"
        return self._entry

    def __enter__(self) -> Self:
        self._file = create_plain(self.path)
        self._file.write(_header(self.dtype, 0))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        file = self._file
        assert file is not None, "entered"
        try:
            if kind is None:
                # numpy pads the header for any number of records.
                file.seek(0)
                file.write(_header(self.dtype, self.num_records))
                file.close()
                self._entry = finish(self.path)
        finally:
            if self._entry is None:
                close_quietly(file)
                self.path.unlink(missing_ok=True)

    def write(self, records: NDArray[Any]) -> None:
        """Append sorted records."""
        assert self._file is not None, "entered"
        if len(records):
            self._file.write(np.ascontiguousarray(records, self.dtype).view(np.uint8).data)
            self.num_records += len(records)


def map_records(path: Path, dtype: np.dtype[Any], num_records: int) -> NDArray[Any]:
    """Memory-map a file's records. Raises `BrokenCheckpoint` for any other file."""
    header = _header(dtype, num_records)
    try:
        with path.open("rb") as file:
            start = file.read(len(header))
        if start != header:
            raise BrokenCheckpoint(
                f"{path}: expected {num_records} records of {dtype.itemsize} bytes, got other content"
            )
        if not num_records:
            return np.empty(0, dtype)
        return np.memmap(path, dtype, mode="r", offset=len(header), shape=(num_records,))
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error}") from None


def take_records(records: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[Any]:
    """Gather records by position, as bytes: numpy copies structured records field by field, 7 times slower."""
    found: NDArray[Any] = _as_bytes(records).take(positions).view(records.dtype)
    return found


def join_records(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate one or more arrays of records, also as bytes."""
    joined: NDArray[Any] = np.concatenate([_as_bytes(part) for part in parts]).view(parts[0].dtype)
    return joined


def _as_bytes(records: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(records).view(np.dtype((np.void, records.dtype.itemsize)))


def save_names(path: Path, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> FileEntry:
    """Write row names, ``[n]`` each."""
    names = np.empty(len(ids), NAME_DTYPE)
    names["table"] = tables
    names["id"] = ids
    with RecordFile(path, NAME_DTYPE) as file:
        file.write(names)
    return file.entry


def load_names(folder: Path, entry: FileEntry) -> NDArray[np.void]:
    """Row names as `NAME_DTYPE`, in the order they were written. Raises `BrokenCheckpoint`."""
    num_names = (entry.num_bytes - len(_header(NAME_DTYPE, 0))) // NAME_DTYPE.itemsize
    return map_records(folder / entry.name, NAME_DTYPE, max(0, num_names))


def names_in(path: Path) -> NDArray[np.void]:
    """Row names of a file whose checksum nobody compares. Raises `BrokenCheckpoint` for any other file."""
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read: {error}") from None
    return load_names(path.parent, FileEntry(name=path.name, num_bytes=num_bytes, xxh3_128=""))


def latest_positions(
    tables: NDArray[np.uint32], ids: NDArray[np.int64], steps: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Position of each row's latest record: the highest step, the last one among equal steps.

    Args:
        tables, ids, steps: columns of the records, ``[n]``.

    Returns:
        int64 ``[number of rows]``, in ascending order of (table, id).
    """
    count = len(ids)
    if not count:
        return np.empty(0, np.int64)
    by_step = None if (steps[1:] >= steps[:-1]).all() else np.argsort(steps, kind="stable")
    if by_step is not None:
        tables, ids = tables[by_step], ids[by_step]
    low, high, top = int(ids.min()), int(ids.max()), int(tables.max())
    id_bits, position_bits = (high - low).bit_length(), (count - 1).bit_length()
    if top.bit_length() + id_bits + position_bits <= 64:
        # One sort of packed words (table, id, position): several times faster than three argsorts.
        words = (ids - np.int64(low)).astype(np.uint64)
        words |= tables.astype(np.uint64) << np.uint64(id_bits)
        words <<= np.uint64(position_bits)
        words |= np.arange(count, dtype=np.uint64)
        words.sort()
        positions = (words & np.uint64((1 << position_bits) - 1)).astype(np.int64)
        words >>= np.uint64(position_bits)
        last = np.append(words[1:] != words[:-1], True)
    else:
        positions = np.lexsort((ids, tables))
        sorted_ids, sorted_tables = ids[positions], tables[positions]
        last = np.append((sorted_ids[1:] != sorted_ids[:-1]) | (sorted_tables[1:] != sorted_tables[:-1]), True)
    latest: NDArray[np.int64] = positions[last]
    return latest if by_step is None else by_step[latest]


def _header(dtype: np.dtype[Any], num_records: int) -> bytes:
    header = io.BytesIO()
    npy.write_array_header_1_0(
        header, {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_records,)}
    )
    return header.getvalue()


def close_quietly(file: BinaryIO) -> None:
    """Close a discarded file; ignore flush errors."""
    try:
        file.close()
    except OSError:
        return
