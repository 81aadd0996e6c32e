"""`RowWriter`: rows changed between two checkpoints, journaled at write-back and sorted at the checkpoint.

    net-out lane ──append(requests, step)──> journal, one per row width (in write order, with duplicates)
                 ──delete(requests, step)──> journal of deletions
    background   ──seal(folder, step)──> rows-<step>-<rank>-<row bytes>.npy (sorted, each row once, its latest value)
                                         deleted-<step>-<rank>.npy (sorted, each row once, its latest deletion)

The journal is scratch space: it is not durable and not read after a crash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.files import create_plain
from bagpipe.checkpoint.manifest import FileEntry, RowFile
from bagpipe.checkpoint.row_file import (
    MAX_STEP,
    RecordFile,
    close_quietly,
    file_dtype,
    latest_positions,
    save_names,
    take_records,
    words_as,
)
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.types.schema import RowSchema

__all__ = ["RowWriter", "save_dirty"]

#: Write buffer of a journal: the small tables of a batch share one system call.
_BUFFER_BYTES = 1 << 20

#: Bytes of sorted rows gathered at a time.
_CHUNK_BYTES = 4 << 20


@dataclass(slots=True, kw_only=True, eq=False)
class _Journal:
    """Consecutive records of one width, without a header. Deletions have width 0."""

    path: Path
    row_bytes: int
    dtype: np.dtype[np.void]
    file: BinaryIO
    num_rows: int = 0


class RowWriter:
    """One rank's changed rows of one interval between checkpoints. One thread at a time.

    Creates its files at the first row; `seal` or `discard` removes them.

    Args:
        folder: folder of the journal, on the checkpoint's file system: `CheckpointFolder.generation_folder`.
        schema: schema of the rows.
        rank: this rank.
        epoch: epoch of the interval; part of the journal's name.

    Raises:
        OSError: from any method: a file operation failed.
    """

    def __init__(self, folder: Path, schema: RowSchema, *, rank: int, epoch: int) -> None:
        self._folder = folder
        self._schema = schema
        self._rank = rank
        self._epoch = epoch
        self._journals: dict[int, _Journal] = {}

    def append(self, requests: Sequence[WriteRequest], step: int) -> None:
        """Append rows. The value with the highest step wins, the last one among equal steps.

        Args:
            requests: rows of any tables.
            step: batch for which the rows were evicted; the checkpoint's own step for rows of its snapshot.
        """
        _check_step(step)
        by_width: dict[int, list[WriteRequest]] = {}
        for request in requests:
            if len(request.ids):
                by_width.setdefault(self._schema.row_bytes(request.table), []).append(request)
        for row_bytes, group in by_width.items():
            journal = self._journal(row_bytes)
            records, spans = _named(group, step, journal.dtype)
            for request, span in zip(group, spans, strict=True):
                records["row"][span] = words_as(request.rows, journal.dtype["row"].base)
            _put(journal, records)

    def delete(self, requests: Sequence[DeleteRequest], step: int) -> None:
        """Append deletions. Each removes all records of its row up to its step, in this and earlier intervals.

        Args:
            requests: rows of any tables.
            step: batch before which the rows expired.
        """
        _check_step(step)
        named = [request for request in requests if len(request.ids)]
        if named:
            journal = self._journal(0)
            _put(journal, _named(named, step, journal.dtype)[0])

    def seal(self, folder: Path, step: int) -> tuple[RowFile, ...]:
        """Sort the rows into durable files, one per width that has rows, one of deletions, and remove the journal.

        Heap: about 40 B per appended row, plus a few MiB.

        Args:
            folder: folder of the checkpoint.
            step: step of the checkpoint.
        """
        sealed = []
        for row_bytes in sorted(self._journals):
            journal = self._journals[row_bytes]
            journal.file.close()
            name = f"rows-{step:08d}-{self._rank:04d}-{row_bytes:06d}.npy"
            if not row_bytes:
                name = f"deleted-{step:08d}-{self._rank:04d}.npy"
            sealed.append(self._sort(journal, folder / name, step))
        self.discard()
        return tuple(sealed)

    def discard(self) -> None:
        """Remove the journal. Idempotent."""
        while self._journals:
            journal = self._journals.popitem()[1]
            close_quietly(journal.file)
            journal.path.unlink(missing_ok=True)

    def _journal(self, row_bytes: int) -> _Journal:
        journal = self._journals.get(row_bytes)
        if journal is None:
            path = self._folder / f"journal-{self._epoch:06d}-{self._rank:04d}-{row_bytes:06d}"
            dtype = file_dtype(self._schema, row_bytes)
            file = create_plain(path, buffer_bytes=_BUFFER_BYTES)
            journal = _Journal(path=path, row_bytes=row_bytes, dtype=dtype, file=file)
            self._journals[row_bytes] = journal
        return journal

    def _sort(self, journal: _Journal, target: Path, step: int) -> RowFile:
        dtype = journal.dtype
        records = np.memmap(journal.path, dtype, mode="r", shape=(journal.num_rows,))
        positions = latest_positions(records["table"], records["id"], records["step"])
        chunk_rows = max(1, _CHUNK_BYTES // dtype.itemsize)
        with RecordFile(target, dtype) as file:
            for first in range(0, len(positions), chunk_rows):
                file.write(take_records(records, positions[first : first + chunk_rows]))
        return RowFile(file=file.entry, row_bytes=journal.row_bytes, num_rows=len(positions), full=False, step=step)


def _check_step(step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        raise ValueError(f"step must be in [0, {MAX_STEP}], got {step}")


def _named(
    requests: Sequence[WriteRequest | DeleteRequest], step: int, dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], list[slice]]:
    """Records that name the rows of requests, and the span of each request."""
    ends = np.cumsum([len(request.ids) for request in requests]).tolist()
    spans = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]
    records = np.zeros(ends[-1], dtype)
    records["step"] = step
    for request, span in zip(requests, spans, strict=True):
        records["table"][span] = request.table
        records["id"][span] = request.ids
    return records, spans


def _put(journal: _Journal, records: NDArray[np.void]) -> None:
    journal.file.write(records.data)
    journal.num_rows += len(records)


def save_dirty(folder: Path, *, rank: int, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> FileEntry:
    """Write the names of dirty rows, newer in the cache than in the store: uint32 and int64 ``[n]``, any order."""
    return save_names(folder / f"dirty-{rank:04d}.npy", tables, ids)
