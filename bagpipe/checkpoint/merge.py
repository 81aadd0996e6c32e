"""Streaming merge of sorted row files: the latest record of each row, in order, a few MiB at a time.

    full file     ids  1  4  7  9 ..          span 0: ids <= 7      span 1: ids <= 15 …
    rows of 400   ids     4     9 ..   ──>    read together, sorted, the latest kept ──> full file, store, index
    rows of 800   ids  1        9 ..

Records are ordered by (step of the file's checkpoint, step of the record); the latest one wins. A row whose latest
record is a deletion does not exist; of equal pairs, the deletion is the later one. A row that was created anew after a
deletion has records of later batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import BrokenCheckpoint, RowFile
from bagpipe.checkpoint.row_file import (
    RecordFile,
    file_dtype,
    join_records,
    latest_positions,
    map_records,
    take_records,
)
from bagpipe.types.schema import RowSchema
from bagpipe.util.distinct_ids import distinct_ids

__all__ = ["CHUNK_BYTES", "IsKept", "SortedFile", "merge_files", "merged_ids", "merged_records", "open_files"]

#: Table number and distinct ids int64 ``[n]`` -> bool ``[n]``: the row stays.
IsKept: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]

#: Largest size of a chunk of records. A merge holds a few times as much.
CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SortedFile:
    """A memory-mapped file of rows or deletions.

    Attributes:
        source: its manifest entry.
        records: all records, mapped.
        bounds: for each table of its width (for deletions, for each table): first record and end.
    """

    source: RowFile
    records: NDArray[Any]
    bounds: dict[int, tuple[int, int]]

    def of(self, table: int) -> NDArray[Any]:
        """The records of a table, in ascending order of ids."""
        first, end = self.bounds[table]
        return self.records[first:end]


def open_files(folder: Path, files: Sequence[RowFile], schema: RowSchema) -> dict[int, tuple[SortedFile, ...]]:
    """Map row files with verified checksums.

    Returns:
        For each table, the files of its width from the last full one on, oldest first; then the files with deletions of
        its rows, oldest first.

    Raises:
        BrokenCheckpoint: a file is missing or has another format.
    """
    by_width: dict[int, list[RowFile]] = {0: [], **{schema.row_bytes(table): [] for table in range(len(schema.tables))}}
    for file in files:
        if file.row_bytes not in by_width:
            raise BrokenCheckpoint(f"{folder / file.file.name}: no table has rows of {file.row_bytes} bytes")
        if file.full:
            by_width[file.row_bytes].clear()
        by_width[file.row_bytes].append(file)
    opened = {
        row_bytes: tuple(_open_file(folder / file.file.name, file, schema) for file in group)
        for row_bytes, group in by_width.items()
    }
    deletions = opened[0]
    return {
        table: opened[schema.row_bytes(table)] + tuple(file for file in deletions if len(file.of(table)))
        for table in range(len(schema.tables))
    }


def _open_file(path: Path, file: RowFile, schema: RowSchema) -> SortedFile:
    records = map_records(path, file_dtype(schema, file.row_bytes), file.num_rows)
    tables = records["table"]
    bounds = {}
    end = 0
    for table in range(len(schema.tables)):
        if file.is_deletions or schema.row_bytes(table) == file.row_bytes:
            first, end = end, int(np.searchsorted(tables, np.uint32(table), side="right"))
            bounds[table] = (first, end)
    if end != len(records):
        raise BrokenCheckpoint(f"{path}: expected rows of tables {list(bounds)}, got table {int(tables[end])}")
    return SortedFile(source=file, records=records, bounds=bounds)


def merged_records(files: Sequence[SortedFile], table: int) -> Iterator[NDArray[Any]]:
    """The latest record of each row of a table, in ascending order of ids, in chunks of up to `CHUNK_BYTES`.

    No chunk is empty.
    """
    for spans in _spans(files, table, CHUNK_BYTES):
        of_rows = [span.records for span in spans if not span.file.source.is_deletions]
        if len(spans) == 1:
            yield from of_rows
        elif of_rows:
            positions = _latest(spans, table)
            if len(positions):
                yield take_records(join_records(of_rows), positions)


def merged_ids(files: Sequence[SortedFile], table: int) -> Iterator[NDArray[np.int64]]:
    """The ids of a table, ascending, distinct, in chunks of up to `CHUNK_BYTES` (of records). No chunk is empty."""
    for spans in _spans(files, table, CHUNK_BYTES):
        ids = [span.records["id"] for span in spans]
        if any(span.file.source.is_deletions for span in spans):
            found = np.concatenate(ids)[_latest(spans, table)]
        else:
            found = distinct_ids(ids) if len(ids) > 1 else np.ascontiguousarray(ids[0])
        if len(found):
            yield found


def merge_files(
    folder: Path,
    files: Sequence[RowFile],
    schema: RowSchema,
    *,
    target: Path,
    step: int,
    on_chunk: Callable[[int], None] = lambda num_rows: None,
    is_kept: IsKept | None = None,
) -> tuple[RowFile, ...]:
    """Merge `files` into full files, one per width that has rows. They replace the deletions among `files` too.

    Args:
        folder: folder of the files.
        files: oldest first.
        schema: schema of the rows.
        target: folder for the full files, ``full-<step>-<row bytes>.npy``.
        step: step of the checkpoint that `files` belong to.
        on_chunk: called after each chunk with its number of rows; can raise to cancel.
        is_kept: tells the rows to keep; None: all.

    Raises:
        BrokenCheckpoint: a file cannot be read.
        OSError: a file cannot be written; the partial file is removed.
    """
    by_table = open_files(folder, files, schema)
    merged = []
    for row_bytes in sorted({file.row_bytes for file in files if not file.is_deletions}):
        name = f"full-{step:08d}-{row_bytes:06d}.npy"
        with RecordFile(target / name, file_dtype(schema, row_bytes)) as out:
            for table in range(len(schema.tables)):
                if schema.row_bytes(table) == row_bytes:
                    for records in merged_records(by_table[table], table):
                        out.write(records if is_kept is None else _kept(records, table, is_kept))
                        on_chunk(len(records))
        if out.num_records:
            merged.append(RowFile(file=out.entry, row_bytes=row_bytes, num_rows=out.num_records, full=True, step=step))
        else:  # no row is left
            out.path.unlink()
    return tuple(merged)


def _kept(records: NDArray[Any], table: int, is_kept: IsKept) -> NDArray[Any]:
    stays = is_kept(table, np.ascontiguousarray(records["id"]))
    return records if stays.all() else take_records(records, np.flatnonzero(stays))


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """Records of a table in a file, in ascending order of ids."""

    file: SortedFile
    records: NDArray[Any]


def _latest(spans: Sequence[_Span], table: int) -> NDArray[np.int64]:
    """Position of each row's latest record among those of all spans, without rows whose latest one is a deletion.

    Spans of deletions come last, so these are positions among the joined records of the other spans.
    """
    sizes = [len(span.records) for span in spans]
    num_records = sum(len(span.records) for span in spans if not span.file.source.is_deletions)
    sources = [span.file.source.step for span in spans]
    ages = np.repeat(np.array(sources, np.int64) << 32, sizes)
    if len(set(sources)) < len(sources):
        # Files of several ranks, where the row's owner can have changed; or rows and deletions of one checkpoint.
        ages |= np.concatenate([span.records["step"] for span in spans])
    ids = np.concatenate([span.records["id"] for span in spans])
    positions = latest_positions(np.full(len(ids), table, np.uint32), ids, ages)
    return positions[positions < num_records]


def _spans(files: Sequence[SortedFile], table: int, chunk_bytes: int) -> Iterator[list[_Span]]:
    """Cut a table at ids into non-empty spans over all files, each of at most `chunk_bytes`."""
    ids = {number: file.of(table)["id"] for number, file in enumerate(files)}
    starts = {number: 0 for number, column in ids.items() if len(column)}
    while starts:
        # The first file is one of rows, if there is one: a deletion takes no more bytes.
        stride = max(1, chunk_bytes // (files[0].records.dtype.itemsize * len(starts)))
        ahead = [
            ids[number][start + stride - 1] for number, start in starts.items() if start + stride < len(ids[number])
        ]
        cut = min(ahead) if ahead else None
        spans = []
        for number, start in tuple(starts.items()):
            column = ids[number]
            end = len(column)
            if cut is not None:
                end = start + int(np.searchsorted(column[start : start + stride], cut, side="right"))
            if end > start:
                spans.append(_Span(files[number], files[number].of(table)[start:end]))
            if end == len(column):
                del starts[number]
            else:
                starts[number] = end
        yield spans
