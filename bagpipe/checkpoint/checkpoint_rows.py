"""`CheckpointRows`: reads a checkpoint's rows by table from its mapped files.

    rows-…, full-…, deleted-… ──open_files──> per table, oldest first ──search newest last──> read(table, ids)
                                                                    ├──merged chunks────> requests(buckets)
                                                                    └──merged ids───────> contains(table, ids)

Files are sorted, so `read` uses binary search in the mapped pages. `contains` is called for every batch and searches an
index of ids (8 B each) in an unlinked temporary file. `count` uses the same index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest
from bagpipe.checkpoint.merge import SortedFile, merged_ids, merged_records, open_files
from bagpipe.checkpoint.row_file import NAME_DTYPE, latest_positions, load_names, take_records, words_as
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.store.row_checksum import table_check_words
from bagpipe.store.row_sums import RowSums
from bagpipe.store.validation import row_dtype
from bagpipe.types.schema import RowSchema
from bagpipe.util.temporary_folder import temporary_file

__all__ = ["CheckpointRows", "check_row_sums"]

#: Ids whose buckets are computed at a time.
_COUNT_ROWS = 1 << 18


class CheckpointRows:
    """Rows of a verified checkpoint. One thread at a time. Stays usable after the folder's removal.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.
        schema: `RowSchema.from_json` of the manifest's row schema.

    Raises:
        BrokenCheckpoint: a file is missing or does not match the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest, schema: RowSchema) -> None:
        self.schema = schema
        self._files: dict[int, tuple[SortedFile, ...]] = open_files(folder, manifest.row_files, schema)
        self._dirty = [load_names(folder, part.dirty) for part in manifest.parts if part.dirty is not None]
        self._index: dict[int, NDArray[np.int64]] | None = None

    @property
    def num_records(self) -> int:
        """Records of all files: an upper bound on the number of rows."""
        return sum(map(self.num_records_of, self._files))

    def num_records_of(self, table: int) -> int:
        """Records of one table: an upper bound on its number of rows."""
        return sum(len(file.of(table)) for file in self._files[table] if not file.source.is_deletions)

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """Rows of one table, in the order of the ids; zeros for missing rows."""
        rows = np.zeros((len(ids), self.schema.row_width(table)), row_dtype(self.schema, table))
        order = np.argsort(ids)
        wanted = ids[order]
        ages = np.full(len(ids), -1, np.int64)
        is_deleted = np.zeros(len(ids), np.bool_)
        for file in self._files[table]:
            records = file.of(table)
            if not len(records):
                continue
            positions = np.minimum(np.searchsorted(records["id"], wanted), len(records) - 1)
            hits = np.flatnonzero(records["id"][positions] == wanted)
            steps = (np.int64(file.source.step) << 32) | records["step"][positions[hits]].astype(np.int64)
            newer = steps >= ages[order[hits]]
            hits, steps = hits[newer], steps[newer]
            places = order[hits]
            ages[places] = steps
            is_deleted[places] = file.source.is_deletions  # these files come last
            rows[places] = 0 if file.source.is_deletions else words_as(records["row"][positions[hits]], rows.dtype)
        found = (ages >= 0) & ~is_deleted
        return ReadResult(rows, found, np.where(found, table_check_words(table, ids, rows), np.uint64(0)))

    def contains(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each row exists in the checkpoint, bool ``[n]``. The first call builds the index."""
        self.build_index()
        assert self._index is not None, "just built"
        known = self._index[table]
        if not len(known):
            return np.zeros(len(ids), np.bool_)
        positions = np.minimum(np.searchsorted(known, ids), len(known) - 1)
        found: NDArray[np.bool_] = known[positions] == ids
        return found

    def build_index(self) -> None:
        """Build the index of `contains` once: 8 B per row, in a temporary file."""
        if self._index is not None:
            return
        index = {}
        with temporary_file() as file:
            counts = {}
            for table, files in self._files.items():
                counts[table] = 0
                for ids in merged_ids(files, table):
                    file.write(ids.astype("<i8", copy=False).data)
                    counts[table] += len(ids)
            file.flush()
            total = sum(counts.values())
            every: NDArray[Any] = np.memmap(file, "<i8", mode="r", shape=(total,)) if total else np.empty(0, "<i8")
        first = 0
        for table, count in counts.items():
            index[table] = every[first : first + count]
            first += count
        self._index = index

    def ids(self, table: int) -> NDArray[np.int64]:
        """All ids of a table that have a row, ascending. Heap: 16 B per id."""
        return np.concatenate([np.empty(0, np.int64), *merged_ids(self._files[table], table)])

    def extent(self, table: int) -> tuple[int, int, int]:
        """Number of a table's rows, the least and the largest id (0 and -1 without rows). Builds no index."""
        num_rows, least, largest = 0, 0, -1
        for ids in merged_ids(self._files[table], table):
            if len(ids):
                least, largest = least if num_rows else int(ids[0]), int(ids[-1])
                num_rows += len(ids)
        return num_rows, least, largest

    def count(self, num_buckets: int) -> NDArray[np.int64]:
        """Rows in each bucket of a namespace, int64 ``[num_buckets]``."""
        self.build_index()
        assert self._index is not None, "just built"
        counts = np.zeros(num_buckets, np.int64)
        for table, known in self._index.items():
            for first in range(0, len(known), _COUNT_ROWS):
                buckets = bucket_of(np.array([table], np.uint32), known[first : first + _COUNT_ROWS], num_buckets)
                counts += np.bincount(buckets, minlength=num_buckets)
        return counts

    def sums(self, num_buckets: int) -> RowSums:
        """Sums of the check words of all rows, in a namespace of `num_buckets` buckets. Reads every row."""
        sums = RowSums(num_buckets)
        for table in range(len(self.schema.tables)):
            for request in self.rows(table):
                _add(sums, request)
        return sums

    def dirty_sums(self, num_buckets: int) -> RowSums:
        """Sums of the check words of the `dirty` rows."""
        sums = RowSums(num_buckets)
        tables, ids = self.dirty()
        for table in np.unique(tables).tolist():
            named = ids[tables == table]
            result = self.read(table, named)
            sums.add_rows(np.array([table], np.uint32), named, result.checks)
        return sums

    def rows(self, table: int) -> Iterator[WriteRequest]:
        """All rows of a table, in ascending order of ids, in chunks of a few MiB."""
        for records in merged_records(self._files[table], table):
            yield self._request(table, records)

    def requests(
        self, *, buckets: Collection[int] | None = None, num_buckets: int = 1
    ) -> Iterator[tuple[WriteRequest, ...]]:
        """Write requests of all rows, each row once, in chunks of a few MiB.

        Args:
            buckets: only rows of these buckets. None: all rows.
            num_buckets: number of buckets in the namespace.
        """
        wanted = np.ones(num_buckets, np.bool_)
        if buckets is not None:
            wanted[:] = False
            wanted[list(buckets)] = True
        for table in range(len(self.schema.tables)):
            for records in merged_records(self._files[table], table):
                if buckets is not None:
                    positions = bucket_of(np.array([table], np.uint32), records["id"], num_buckets)
                    records = take_records(records, np.flatnonzero(wanted[positions]))
                if len(records):
                    yield (self._request(table, records),)

    def dirty(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Names of dirty rows, newer in a cache than in the store: tables and ids ``[n]``, sorted, distinct."""
        names = np.concatenate([np.empty(0, NAME_DTYPE), *self._dirty])
        tables, ids = names["table"].astype(np.uint32), names["id"].astype(np.int64)
        positions = latest_positions(tables, ids, np.zeros(len(ids), np.int64))
        return tables[positions], ids[positions]

    def _request(self, table: int, records: NDArray[Any]) -> WriteRequest:
        """Copies, which the caller may change; the records can be those of a mapped file."""
        rows = words_as(np.array(records["row"]), row_dtype(self.schema, table))
        return WriteRequest(table, np.array(records["id"]), rows)


def check_row_sums(folder: Path, manifest: Manifest) -> None:
    """Check that the rows of a checkpoint follow from the rows that its jobs wrote. Reads every row.

    Raises:
        BrokenCheckpoint: they do not, or a file is missing or does not match the manifest.
    """
    if not manifest.row_sums:
        return
    expected = RowSums.of(manifest.row_sums)
    rows = CheckpointRows(folder, manifest, RowSchema.from_json(manifest.row_schema))
    found = rows.sums(expected.num_buckets) - rows.dirty_sums(expected.num_buckets)
    differing = expected.differing(found)
    if len(differing):
        raise BrokenCheckpoint(
            f"{folder}: rows of {len(differing)} of {expected.num_buckets} buckets were trained from values other than "
            "the last ones written: another program had set rows of the store back, changed or removed them"
        )


def _add(sums: RowSums, request: WriteRequest) -> None:
    words = table_check_words(request.table, request.ids, request.rows)
    sums.add_rows(np.array([request.table], np.uint32), request.ids, words)
