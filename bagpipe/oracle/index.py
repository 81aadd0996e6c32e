"""The batch index: distinct rows of one batch, and the map between occurrences and rows in both directions.

One sort of packed words yields all of it. A word is ``id << position_bits | occurrence``; occurrences of a table are
contiguous, so sorting each table's slice sorts by (table, id, occurrence):

    sorted words ──top bits change──> unique rows        ──low bits──> `order` (CSR columns)
                 ──running count────> `inverse` (scattered through `order`)

Ids too wide to share a 64-bit word with the occurrence number are first replaced by their rank within the table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.types.batch import Batch

__all__ = ["BatchIndex", "Indexer"]

_NARROW_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchIndex:
    """Unique rows of a batch; the arrays are those of `ConsumerPlan`.

    Attributes:
        unique: distinct rows by table; inside a table ascending by id as an unsigned number.
        inverse: int32 ``[num_occurrences]``.
        offsets: int32 ``[len(unique) + 1]``.
        order: int32 ``[num_occurrences]``.
    """

    unique: RowList
    inverse: NDArray[np.int32]
    offsets: NDArray[np.int32]
    order: NDArray[np.int32]


class Indexer:
    """Indexes batches. Reuses its scratch arrays, because fresh pages cost as much as the arithmetic."""

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._words = np.empty(0, dtype=np.uint64)
        self._order = np.empty(0, dtype=np.int64)
        self._positions = np.empty(0, dtype=np.uint64)
        self._row_of_sorted = np.empty(0, dtype=np.int32)

    def index(self, batch: Batch) -> BatchIndex:
        """Index the ids of one batch. O(n log n) in its occurrences, no Python loop over ids.

        Raises:
            InputError: an id outside ``[0, rows)`` of a bounded table.
        """
        values, occurrence_offsets = _occurrences(batch, self.spec)
        num_occurrences = values.shape[0]
        if num_occurrences > self._words.shape[0]:
            self._words = np.empty(num_occurrences, dtype=np.uint64)
            self._order = np.empty(num_occurrences, dtype=np.int64)
            self._positions = np.arange(num_occurrences, dtype=np.uint64)
            self._row_of_sorted = np.empty(num_occurrences, dtype=np.int32)
        words = self._words[:num_occurrences]
        largest_ids = _largest_ids(values, occurrence_offsets, self.spec, batch.index)
        position_bits, wide_ids = _pack(
            values, occurrence_offsets, largest_ids, self._positions[:num_occurrences], words
        )
        for table, (start, stop) in enumerate(itertools.pairwise(occurrence_offsets.tolist())):
            if largest_ids[table] >> (_NARROW_BITS - position_bits) == 0:
                # Words of few bits sort in half the time as 32-bit numbers.
                narrow = words[start:stop].astype(np.uint32)
                narrow.sort()
                words[start:stop] = narrow
            else:
                words[start:stop].sort()

        order = self._order[:num_occurrences]
        np.bitwise_and(words.view(np.int64), (1 << position_bits) - 1, out=order)
        words >>= np.uint64(position_bits)
        is_first = np.empty(num_occurrences, dtype=np.bool_)
        np.not_equal(words[1:], words[:-1], out=is_first[1:])
        starts_of_tables = occurrence_offsets[:-1]
        is_first[starts_of_tables[starts_of_tables < num_occurrences]] = True
        starts = np.flatnonzero(is_first)

        row_of_sorted = self._row_of_sorted[:num_occurrences]
        is_first[:1] = False  # rows are counted from 0
        np.cumsum(is_first, dtype=np.int32, out=row_of_sorted)
        inverse = np.empty(num_occurrences, dtype=np.int32)
        inverse[order] = row_of_sorted
        table_offsets = np.searchsorted(starts, occurrence_offsets).astype(np.int64)
        ids = words.take(starts).view(np.int64)
        for table, table_ids in wide_ids.items():
            rows = slice(int(table_offsets[table]), int(table_offsets[table + 1]))
            ids[rows] = table_ids[ids[rows]]
        offsets = np.empty(starts.shape[0] + 1, dtype=np.int32)
        offsets[:-1] = starts
        offsets[-1] = num_occurrences
        return BatchIndex(
            unique=RowList(table_offsets=table_offsets, ids=ids),
            inverse=inverse,
            offsets=offsets,
            order=order.astype(np.int32),
        )


def _occurrences(batch: Batch, spec: OracleSpec) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids in segment order, and where each table's occurrences start: int64 ``[num_tables + 1]``."""
    feature_offsets = batch.feature_offsets()
    segments = [(int(feature_offsets[ref.feature]), int(feature_offsets[ref.feature + 1])) for ref in spec.features]
    lengths = np.zeros(len(spec.table_rows) + 1, dtype=np.int64)
    for ref, (start, stop) in zip(spec.features, segments, strict=True):
        lengths[ref.table + 1] += stop - start
    if [ref.feature for ref in spec.features] == list(range(batch.num_features)):
        values = batch.values
    elif segments:
        values = np.concatenate([batch.values[start:stop] for start, stop in segments])
    else:
        values = batch.values[:0]
    return values, np.cumsum(lengths)


def _largest_ids(
    values: NDArray[np.int64], occurrence_offsets: NDArray[np.int64], spec: OracleSpec, batch_index: int
) -> list[int]:
    """The largest id of each table, read as unsigned (a negative id is a huge one); 0 for a table without ids."""
    ids = values.view(np.uint64)
    largest_ids = []
    for table, (start, stop) in enumerate(itertools.pairwise(occurrence_offsets.tolist())):
        largest = int(ids[start:stop].max()) if stop > start else 0
        rows = spec.table_rows[table]
        if rows is not None and stop > start and largest >= rows:
            got = largest - (1 << 64) if largest >> 63 else largest
            raise InputError(f"batch {batch_index}, table number {table}: expected ids in [0, {rows}), got {got}")
        largest_ids.append(largest)
    return largest_ids


def _pack(
    values: NDArray[np.int64],
    occurrence_offsets: NDArray[np.int64],
    largest_ids: list[int],
    positions: NDArray[np.uint64],
    words: NDArray[np.uint64],
) -> tuple[int, dict[int, NDArray[np.int64]]]:
    """Fill `words`; their position bits, and for tables whose ids are too wide the ids by rank."""
    num_occurrences = values.shape[0]
    position_bits = max(1, (num_occurrences - 1).bit_length()) if num_occurrences else 1
    wide = [table for table, largest in enumerate(largest_ids) if largest >> (64 - position_bits)]
    ids = values.view(np.uint64)
    wide_ids: dict[int, NDArray[np.int64]] = {}
    if wide:
        ids = ids.copy()
        for table in wide:
            part = ids[occurrence_offsets[table] : occurrence_offsets[table + 1]]
            unsigned, ranks = np.unique(part, return_inverse=True)
            wide_ids[table] = unsigned.view(np.int64)
            part[:] = ranks.astype(np.uint64)
    np.left_shift(ids, np.uint64(position_bits), out=words)
    words |= positions
    return position_bits, wide_ids
