"""Indexes a batch and splits it over the ranks.

Batch ─> Indexer ──one rank────────────────────────────────> IndexedBatch.whole
                 └─many─> Assigner ─> split_index ─> learn ──> IndexedBatch.rank_indexes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assign import ASSIGNERS
from bagpipe.oracle.index import BatchIndex, Indexer
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.oracle.rank_index import RankIndex, split_index
from bagpipe.types.batch import Batch

__all__ = ["BatchIndexer", "IndexedBatch", "Indexes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedBatch:
    """Index of a batch between its reading and its planning.

    Attributes:
        batch_index: the batch.
        unique: distinct rows of the global batch.
        whole: the index of the batch for a single rank; else None.
        rank_indexes: by rank; empty for a single rank.
        next_use: with the horizon `log`: int32 ``[len(unique)]``, as `Indexer.next_use`; else None.
        is_born: bool ``[len(unique)]``, as `Batch.is_born`; None: rows do not expire.
        expired: rows that are deleted before the batch, in the order of `unique`; None: no row expires here.
        use_words: the ranks that use each unique row, as `bagpipe.oracle.window.RankCounts.of`, if they were counted.
    """

    batch_index: int
    unique: RowList
    whole: BatchIndex | None
    rank_indexes: tuple[RankIndex, ...]
    next_use: NDArray[np.int32] | None = None
    is_born: NDArray[np.bool_] | None = None
    expired: RowList | None = None
    use_words: NDArray[np.uint64] | None = None


class Indexes(Protocol):
    """What a planner takes the index of its batches from: a `BatchIndexer`, or shards."""

    @property
    def learns(self) -> bool: ...

    def num_unique(self, batch: Batch) -> int: ...

    def index(self, batch: Batch) -> IndexedBatch: ...


class BatchIndexer:
    """Indexes batches in order. With several ranks the assignment can depend on previous batches."""

    def __init__(self, spec: OracleSpec) -> None:
        self._spec = spec
        self._indexer = Indexer(spec)
        self._assigner = ASSIGNERS[spec.assign](spec) if spec.world_size > 1 else None

    @property
    def learns(self) -> bool:
        """The split depends on previous batches: a plan that begins in the middle must index those too."""
        return self._assigner is not None and self._assigner.learns

    def num_unique(self, batch: Batch) -> int:
        """Unique rows of a batch. Learns nothing from it.

        Raises:
            InputError: an id outside its table.
        """
        return len(self._indexer.index(batch).unique)

    def index(self, batch: Batch) -> IndexedBatch:
        """Index and split a batch.

        Raises:
            InputError: an id outside its table; or the horizon is `log` and the batch has no next uses.
        """
        index = self._indexer.index(batch)
        whole: BatchIndex | None = index
        rank_indexes: tuple[RankIndex, ...] = ()
        if self._assigner is not None:
            whole, rank_indexes = None, split_index(batch, self._spec, index, self._assigner.assign(batch, index))
            self._assigner.learn(index, rank_indexes)
        return IndexedBatch(
            batch_index=batch.index,
            unique=index.unique,
            whole=whole,
            rank_indexes=rank_indexes,
            next_use=self._indexer.next_use(batch, index) if self._spec.horizon == "log" else None,
            is_born=self._indexer.is_born(batch, index),
            expired=self._indexer.expired(batch),
        )
