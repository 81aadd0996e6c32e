"""The batch index: distinct rows of one batch, and the map between occurrences and rows in both directions.

One sort of packed words yields all of it. A word is ``id << position_bits | occurrence``; occurrences of a table are
contiguous, so sorting each table's slice sorts by (table, id, occurrence):

    sorted words ──top bits change──> unique rows        ──low bits──> `order` (CSR columns)

Ids too wide to share a 64-bit word with the occurrence number are first replaced by their rank within the table. Tables
with few ids each are handled together as far as possible: there a numpy call costs more than the ids of one table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.plan import OracleSpec, RowList, by_occurrence
from bagpipe.types.batch import Batch

__all__ = ["BatchIndex", "Indexer"]

_Number = TypeVar("_Number", np.int32, np.int64, np.bool_)

_NARROW_BITS = 32
#: Ids per table, on average, below which a call for all tables is cheaper than a call for each.
_FEW_IDS = 256
#: The largest id of an unbounded table, as an unsigned number.
_ANY_ID = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchIndex:
    """Unique rows of a batch; the arrays are those of `ConsumerPlan`.

    Attributes:
        unique: distinct rows by table; inside a table ascending by id as an unsigned number.
        offsets: int32 ``[len(unique) + 1]``.
        order: int32 ``[num_occurrences]``.
    """

    unique: RowList
    offsets: NDArray[np.int32]
    order: NDArray[np.int32]

    @property
    def inverse(self) -> NDArray[np.int32]:
        """As `ConsumerPlan.inverse`."""
        return by_occurrence(np.arange(len(self.unique), dtype=np.int32), self.offsets, self.order)


@dataclass(frozen=True, slots=True, eq=False)
class _WideIds:
    """Distinct ids of tables `first_table` up to `end_table`, ascending as unsigned numbers: a rank is its place."""

    first_table: int
    end_table: int
    ids: NDArray[np.int64]


class Indexer:
    """Indexes batches. Reuses its scratch arrays, because fresh pages cost as much as the arithmetic.

    Raises:
        InputError: a table of no rows.
    """

    def __init__(self, spec: OracleSpec) -> None:
        if 0 in spec.table_rows:
            raise InputError(f"expected tables of at least 1 row, got 0 in table number {spec.table_rows.index(0)}")
        self.spec = spec
        self._last_ids = np.array([_ANY_ID if rows is None else rows - 1 for rows in spec.table_rows], dtype=np.uint64)
        self._features = np.array([ref.feature for ref in spec.features], dtype=np.int64)
        tables = [ref.table for ref in spec.features]
        self._shared_tables = sorted({table for table in tables if tables.count(table) > 1})
        # Where each table's segments start: those of a table follow each other.
        self._first_segments = np.searchsorted(tables, np.arange(len(spec.table_rows) + 1))
        self._words = np.empty(0, dtype=np.uint64)
        self._order = np.empty(0, dtype=np.int64)
        self._positions = np.empty(0, dtype=np.uint64)

    def index(self, batch: Batch) -> BatchIndex:
        """Index the ids of one batch. O(n log n) in its occurrences, no Python loop over ids.

        Raises:
            InputError: an id outside ``[0, rows)`` of a bounded table.
        """
        values, occurrence_offsets = self._occurrences(batch)
        num_occurrences = values.shape[0]
        if num_occurrences > self._words.shape[0]:
            self._words = np.empty(num_occurrences, dtype=np.uint64)
            self._order = np.empty(num_occurrences, dtype=np.int64)
            self._positions = np.arange(num_occurrences, dtype=np.uint64)
        words = self._words[:num_occurrences]
        largest_ids = self._largest_ids(values, occurrence_offsets, batch.index)
        position_bits, wide_ids = _pack(
            values, occurrence_offsets, largest_ids, self._positions[:num_occurrences], words
        )
        _sort(words, occurrence_offsets, largest_ids >> np.uint64(_NARROW_BITS - position_bits) == 0)

        order = self._order[:num_occurrences]
        np.bitwise_and(words.view(np.int64), (1 << position_bits) - 1, out=order)
        words >>= np.uint64(position_bits)
        is_first = np.empty(num_occurrences, dtype=np.bool_)
        np.not_equal(words[1:], words[:-1], out=is_first[1:])
        starts_of_tables = occurrence_offsets[:-1]
        is_first[starts_of_tables[starts_of_tables < num_occurrences]] = True
        starts = np.flatnonzero(is_first)

        table_offsets = np.searchsorted(starts, occurrence_offsets).astype(np.int64)
        ids = words.take(starts).view(np.int64)
        for wide in wide_ids:
            rows = slice(*table_offsets[[wide.first_table, wide.end_table]].tolist())
            ids[rows] = wide.ids[ids[rows]]
        offsets = np.empty(starts.shape[0] + 1, dtype=np.int32)
        offsets[:-1] = starts
        offsets[-1] = num_occurrences
        return BatchIndex(
            unique=RowList(table_offsets=table_offsets, ids=ids),
            offsets=offsets,
            order=order.astype(np.int32),
        )

    def next_use(self, batch: Batch, index: BatchIndex) -> NDArray[np.int32]:
        """int32 ``[len(unique)]``: the next batch of the log that uses each row, as `Batch.next_use` tells.

        Raises:
            InputError: the batch does not tell.
        """
        if batch.next_use is None:
            raise InputError(f"batch {batch.index} does not tell the next uses that the horizon log needs")
        of_occurrences, _ = self._in_segments(batch, batch.next_use)
        # The last occurrence of a row is in its last example, except in tables of several features.
        latest: NDArray[np.int32] = of_occurrences.take(index.order.take(index.offsets[1:] - 1))
        for table in self._shared_tables:
            first, end = index.unique.table_offsets[table : table + 2].tolist()
            if first < end:
                starts = index.offsets[first:end]
                occurrences = index.order[starts[0] : index.offsets[end]]
                latest[first:end] = np.maximum.reduceat(of_occurrences.take(occurrences), starts - starts[0])
        return latest

    def is_born(self, batch: Batch, index: BatchIndex) -> NDArray[np.bool_] | None:
        """bool ``[len(unique)]``: the row is new, as `Batch.is_born` tells; None if rows do not expire."""
        if batch.is_born is None:
            return None
        of_occurrences, _ = self._in_segments(batch, batch.is_born)
        return of_occurrences.take(index.order.take(index.offsets[:-1]))

    def expired(self, batch: Batch) -> RowList | None:
        """The rows that are deleted before a batch, in the order of `BatchIndex.unique`; None if none expires.

        Raises:
            InputError: a table has features of several tables of the data, where rows expire each by its own.
        """
        if not batch.expired:
            return None
        of_tables = [np.empty(0, dtype=np.int64)] * len(self.spec.table_rows)
        for table in range(len(of_tables)):
            features = {ref.feature for ref in self.spec.features if ref.table == table}
            for rows in batch.expired:
                if features & set(rows.features):
                    if not features <= set(rows.features):
                        raise InputError(
                            f"table number {table}: expected features of one table of the data with data.expire_after, "
                            "got those of several"
                        )
                    of_tables[table] = rows.ids
        table_offsets = np.zeros(len(of_tables) + 1, dtype=np.int64)
        np.cumsum([ids.shape[0] for ids in of_tables], out=table_offsets[1:])
        return RowList(table_offsets=table_offsets, ids=np.concatenate([np.empty(0, dtype=np.int64), *of_tables]))

    def _occurrences(self, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Ids in segment order, and where each table's occurrences start: int64 ``[num_tables + 1]``."""
        return self._in_segments(batch, batch.values)

    def _in_segments(self, batch: Batch, array: NDArray[_Number]) -> tuple[NDArray[_Number], NDArray[np.int64]]:
        """As `_occurrences`, of one number per occurrence."""
        feature_offsets = batch.feature_offsets()
        ends = np.zeros(self._features.shape[0] + 1, dtype=np.int64)
        np.cumsum(np.diff(feature_offsets).take(self._features), out=ends[1:])
        if self._features.tolist() == list(range(batch.num_features)):
            values = array
        elif self._features.shape[0]:
            starts, stops = feature_offsets.take(self._features), feature_offsets.take(self._features + 1)
            values = np.concatenate(
                [array[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            )
        else:
            values = array[:0]
        return values, ends.take(self._first_segments)

    def _largest_ids(
        self, values: NDArray[np.int64], occurrence_offsets: NDArray[np.int64], batch_index: int
    ) -> NDArray[np.uint64]:
        """The largest id of each table, read as unsigned (a negative id is a huge one); 0 for a table without ids."""
        largest_ids = np.zeros(self._last_ids.shape[0], dtype=np.uint64)
        used = np.flatnonzero(occurrence_offsets[1:] > occurrence_offsets[:-1])
        ids = values.view(np.uint64)
        if used.shape[0]:
            largest_ids[used] = np.maximum.reduceat(ids, occurrence_offsets.take(used))
        outside = np.flatnonzero(largest_ids > self._last_ids)
        if outside.shape[0]:
            table = int(outside[0])
            got = int(largest_ids[table : table + 1].view(np.int64)[0])
            rows = self.spec.table_rows[table]
            raise InputError(f"batch {batch_index}, table number {table}: expected ids in [0, {rows}), got {got}")
        return largest_ids


def _sort(words: NDArray[np.uint64], offsets: NDArray[np.int64], is_narrow: NDArray[np.bool_]) -> None:
    """Sort the words of each table. `is_narrow` by table: they fit 32 bits, so they sort in half the time."""
    num_tables = is_narrow.shape[0]
    counts = np.diff(offsets)
    if 0 < words.shape[0] < _FEW_IDS * num_tables and (counts == counts[0]).all():
        by_table = words.reshape(num_tables, -1)
        if is_narrow.all():
            narrow = by_table.astype(np.uint32)
            narrow.sort(axis=1)
            by_table[:] = narrow
        else:
            by_table.sort(axis=1)
        return
    # Conversion costs more than it saves for few words.
    narrowed = (is_narrow & (counts >= _FEW_IDS)).tolist()
    for (start, stop), is_converted in zip(itertools.pairwise(offsets.tolist()), narrowed, strict=True):
        if is_converted:
            narrow = words[start:stop].astype(np.uint32)
            narrow.sort()
            words[start:stop] = narrow
        else:
            words[start:stop].sort()


def _pack(
    values: NDArray[np.int64],
    occurrence_offsets: NDArray[np.int64],
    largest_ids: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    words: NDArray[np.uint64],
) -> tuple[int, list[_WideIds]]:
    """Fill `words`; their position bits, and of tables whose ids are too wide the ids by rank."""
    num_occurrences = values.shape[0]
    position_bits = max(1, (num_occurrences - 1).bit_length()) if num_occurrences else 1
    wide = np.flatnonzero(largest_ids >> np.uint64(64 - position_bits)).tolist()
    ids = values.view(np.uint64)
    wide_ids: list[_WideIds] = []
    if wide:
        ids = ids.copy()
        # One call for all tables from the first wide one to the last, or one each.
        few = num_occurrences < _FEW_IDS * largest_ids.shape[0]
        for first, end in [(wide[0], wide[-1] + 1)] if few else [(table, table + 1) for table in wide]:
            part = ids[occurrence_offsets[first] : occurrence_offsets[end]]
            unsigned, ranks = np.unique(part, return_inverse=True)
            wide_ids.append(_WideIds(first, end, unsigned.view(np.int64)))
            part[:] = ranks.astype(np.uint64)
    np.left_shift(ids, np.uint64(position_bits), out=words)
    words |= positions
    return position_bits, wide_ids
