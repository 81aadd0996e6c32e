"""The index of a batch in shards: each one indexes some tables, and the planner joins their results. Byte-equal.

    shard    its tables' ids ─> BatchIndexer ─> IndexedBatch without the rows of other tables
    planner  IndexedBatch of every shard ─> ShardMerger: table after table, plus constant offsets ─> IndexedBatch of all

Unique rows are numbered table after table, occurrences segment after segment. So a run of neighbouring tables of one
shard is a slice of each of its arrays, and its numbers in the whole differ by a constant. Where the assignment of
examples to ranks needs the size of a batch alone, the shards split their indexes. One that learns is made once, of the
joined index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assign import ASSIGNERS
from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch
from bagpipe.oracle.index import BatchIndex
from bagpipe.oracle.plan import FeatureRef, OracleSpec, RowList
from bagpipe.oracle.rank_index import RankIndex, split_index
from bagpipe.oracle.window import RankCounts
from bagpipe.types.batch import Batch

__all__ = ["MergedIndexer", "ShardMerger", "assign_tables", "shard_features", "shard_spec"]

_Number = TypeVar("_Number", np.int32, np.int64)


#: The largest shard of neighbouring tables may have so much more than that of any tables.
_NEIGHBOURS_SLACK = 1.1


def assign_tables(sizes: Sequence[float], num_shards: int, known: Mapping[int, int] | None = None) -> tuple[int, ...]:
    """By table, its shard: neighbouring tables to one shard where that is as even, which makes joining cheap.

    Else the largest table goes first, to the shard with least so far (Graham's LPT rule).

    Args:
        sizes: by table, its ids in a batch.
        num_shards: at least 1, at most as many as there are tables.
        known: shards of tables that are assigned already.
    """
    shards, largest = _largest_first(sizes, num_shards, known or {})
    if known or not largest:
        return shards
    neighbours = _neighbours(sizes, num_shards, largest * _NEIGHBOURS_SLACK)
    return shards if neighbours is None else neighbours


def _neighbours(sizes: Sequence[float], num_shards: int, most: float) -> tuple[int, ...] | None:
    """By table, its shard, which ascends; none has more than `most`. None: there is no such assignment."""
    fair = sum(sizes) / num_shards
    for bound in (fair, (fair + most) / 2, most):
        shards, load, shard = [], 0.0, 0
        for table, size in enumerate(sizes):
            is_needed = len(sizes) - table <= num_shards - 1 - shard  # every shard gets a table
            if table and (is_needed or load + size > bound) and shard + 1 < num_shards:
                shard, load = shard + 1, 0.0
            shards.append(shard)
            load += size
            if load > most:
                break
        else:
            return tuple(shards)
    return None


def _largest_first(sizes: Sequence[float], num_shards: int, known: Mapping[int, int]) -> tuple[tuple[int, ...], float]:
    """By table, its shard; and how much the largest shard has."""
    loads, counts = [0.0] * num_shards, [0] * num_shards
    shards = [0] * len(sizes)
    for table in sorted(range(len(sizes)), key=lambda table: (table not in known, -sizes[table])):
        shard = (
            known[table] if table in known else min(range(num_shards), key=lambda shard: (loads[shard], counts[shard]))
        )
        shards[table] = shard
        loads[shard] += sizes[table]
        counts[shard] += 1
    return tuple(shards), max(loads)


def shard_features(spec: OracleSpec, tables: Collection[int]) -> tuple[int, ...]:
    """The features that some tables read, ascending."""
    return tuple(sorted({ref.feature for ref in spec.features if ref.table in tables}))


def shard_spec(spec: OracleSpec, tables: Collection[int], features: Sequence[int] | None = None) -> OracleSpec:
    """The spec of a shard's index: the features of its tables. Tables keep their numbers; the others have no rows.

    Args:
        spec: of the plans.
        tables: of the shard.
        features: of its batches, as numbers of the whole batches' features; None: all of them.
    """
    refs = [ref for ref in spec.features if ref.table in tables]
    if features is not None:
        place = {feature: number for number, feature in enumerate(features)}
        refs = [FeatureRef(feature=place[ref.feature], table=ref.table) for ref in refs]
    spec = dataclasses.replace(spec, features=tuple(refs))
    if spec.world_size == 1 or not _learns(spec):
        return spec
    return dataclasses.replace(spec, world_size=1, assign="contiguous", example_shares=())


def _learns(spec: OracleSpec) -> bool:
    return BatchIndexer(spec).learns


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring tables of one shard: `first` up to `end`."""

    shard: int
    first: int
    end: int


class _Rows(Protocol):
    """The map between rows and occurrences that a `BatchIndex` and a `RankIndex` have in common."""

    @property
    def offsets(self) -> NDArray[np.int32]: ...

    @property
    def order(self) -> NDArray[np.int32]: ...


class ShardMerger:
    """Joins the shards' indexes of a batch.

    Args:
        spec: of the plans.
        shard_of_table: by table, its shard.
    """

    def __init__(self, spec: OracleSpec, shard_of_table: Sequence[int]) -> None:
        self._rank_counts = RankCounts(spec.world_size, largest=spec.lookahead) if spec.num_slots else None
        borders = [
            table for table in range(1, len(shard_of_table)) if shard_of_table[table] != shard_of_table[table - 1]
        ]
        starts = [0, *borders] if shard_of_table else []
        self._runs = [
            _Run(shard_of_table[first], first, end)
            for first, end in zip(starts, [*borders, len(shard_of_table)], strict=False)
        ]
        self._num_tables = len(shard_of_table)

    def merge(self, parts: Sequence[IndexedBatch]) -> IndexedBatch:
        """The index of the whole batch; `parts` by shard, of the same batch."""
        merged = parts[0] if len(parts) == 1 else self._merge(parts)
        if self._rank_counts is None or not merged.rank_indexes:
            return merged
        rows_of_ranks = [rank_index.rows for rank_index in merged.rank_indexes]
        return dataclasses.replace(merged, use_words=self._rank_counts.of(rows_of_ranks, len(merged.unique)))

    def _merge(self, parts: Sequence[IndexedBatch]) -> IndexedBatch:
        rows_of_shards = [part.unique.table_offsets.tolist() for part in parts]
        # By run, its rows in the shard.
        spans = [(rows_of_shards[run.shard][run.first], rows_of_shards[run.shard][run.end]) for run in self._runs]
        table_offsets = np.zeros(self._num_tables + 1, dtype=np.int64)
        starts, num_rows = [], 0
        for run, (first, stop) in zip(self._runs, spans, strict=True):
            starts.append(num_rows)
            theirs = parts[run.shard].unique.table_offsets[run.first + 1 : run.end + 1]
            table_offsets[run.first + 1 : run.end + 1] = theirs + (num_rows - first)
            num_rows += stop - first
        unique = RowList(table_offsets=table_offsets, ids=self._joined([part.unique.ids for part in parts], spans))
        whole = None
        wholes = [part.whole for part in parts if part.whole is not None]
        if wholes:
            offsets, order = _joined_rows([(wholes[run.shard], *span) for run, span in self._each(spans)])
            whole = BatchIndex(unique=unique, offsets=offsets, order=order)
        rank_indexes = tuple(
            self._joined_rank([part.rank_indexes[rank] for part in parts], spans, starts)
            for rank in range(len(parts[0].rank_indexes))
        )
        return IndexedBatch(
            batch_index=parts[0].batch_index,
            unique=unique,
            whole=whole,
            rank_indexes=rank_indexes,
            next_use=self._joined_next_use([part.next_use for part in parts if part.next_use is not None], spans),
        )

    def _each(self, spans: Sequence[tuple[int, int]]) -> zip[tuple[_Run, tuple[int, int]]]:
        return zip(self._runs, spans, strict=True)

    def _joined(self, arrays: Sequence[NDArray[_Number]], spans: Sequence[tuple[int, int]]) -> NDArray[_Number]:
        """A value for each row."""
        slices: list[NDArray[_Number]] = [arrays[run.shard][first:stop] for run, (first, stop) in self._each(spans)]
        return np.concatenate([arrays[0][:0], *slices])

    def _joined_next_use(
        self, next_use: Sequence[NDArray[np.int32]], spans: Sequence[tuple[int, int]]
    ) -> NDArray[np.int32] | None:
        return self._joined(next_use, spans) if next_use else None

    def _joined_rank(
        self, indexes: Sequence[RankIndex], spans: Sequence[tuple[int, int]], starts: Sequence[int]
    ) -> RankIndex:
        """A rank's index. `starts`: by run, the place of its first row among all."""
        # Where the runs' rows begin and end among those of the rank.
        borders = [index.rows.searchsorted([span[0] for span in spans]).tolist() for index in indexes]
        ends = [index.rows.searchsorted([span[1] for span in spans]).tolist() for index in indexes]
        pieces = [
            (indexes[run.shard], borders[run.shard][number], ends[run.shard][number])
            for number, run in enumerate(self._runs)
        ]
        rows = np.empty(sum(stop - first for _, first, stop in pieces), dtype=np.int32)
        row = 0
        for (index, first, stop), span, start in zip(pieces, spans, starts, strict=True):
            np.add(index.rows[first:stop], start - span[0], out=rows[row : row + stop - first])
            row += stop - first
        offsets, order = _joined_rows(pieces)
        return RankIndex(examples=indexes[0].examples, rows=rows, offsets=offsets, order=order)


def _joined_rows(pieces: Sequence[tuple[_Rows, int, int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`offsets` and `order` of rows that follow each other: of each piece those from one up to another."""
    spans = [(int(index.offsets[first]), int(index.offsets[stop])) for index, first, stop in pieces]
    num_occurrences = sum(end - start for start, end in spans)
    order = np.empty(num_occurrences, dtype=np.int32)
    offsets = np.empty(sum(stop - first for _, first, stop in pieces) + 1, dtype=np.int32)
    row = occurrence = 0
    for (index, first, stop), (start, end) in zip(pieces, spans, strict=True):
        np.add(index.order[start:end], occurrence - start, out=order[occurrence : occurrence + end - start])
        np.add(index.offsets[first:stop], occurrence - start, out=offsets[row : row + stop - first])
        row += stop - first
        occurrence += end - start
    offsets[row] = num_occurrences
    return offsets, order


class MergedIndexer:
    """Indexes batches from the results of shards. Same methods as `BatchIndexer`.

    Args:
        spec: of the plans.
        merged: what `ShardMerger` made of the shards' indexes of a batch, by its number; asked for in order, once each.
    """

    def __init__(self, spec: OracleSpec, merged: Callable[[int], IndexedBatch]) -> None:
        self._spec = spec
        self._merged = merged
        assigner = ASSIGNERS[spec.assign](spec) if spec.world_size > 1 else None
        self._assigner = assigner if assigner is not None and assigner.learns else None
        self._latest: IndexedBatch | None = None

    @property
    def learns(self) -> bool:
        """See `BatchIndexer.learns`."""
        return self._assigner is not None

    def num_unique(self, batch: Batch) -> int:
        """See `BatchIndexer.num_unique`. The batch indexed last, or the one after it."""
        return len(self.index(batch).unique)

    def index(self, batch: Batch) -> IndexedBatch:
        """See `BatchIndexer.index`. The batch indexed last, or the one after it."""
        if self._latest is None or self._latest.batch_index != batch.index:
            self._latest = self._split(batch, self._merged(batch.index))
        return self._latest

    def _split(self, batch: Batch, indexed: IndexedBatch) -> IndexedBatch:
        if self._assigner is None or indexed.whole is None:
            return indexed
        rank_indexes = split_index(batch, self._spec, indexed.whole, self._assigner.assign(batch, indexed.whole))
        self._assigner.learn(indexed.whole, rank_indexes)
        return dataclasses.replace(indexed, whole=None, rank_indexes=rank_indexes)
