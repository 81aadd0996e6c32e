"""How a batch enters the oracle: indexed, and split over the ranks.

Batch ─> Indexer ──one rank──────────────────────────────> Incoming.whole
                 └─many─> Assigner ─> split ─> learn ────> Incoming.shares
"""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.oracle.assign import ASSIGNERS
from bagpipe.oracle.index import BatchIndex, Indexer
from bagpipe.oracle.plan import OracleSpec, RowList
from bagpipe.oracle.split import Share, split
from bagpipe.types.batch import Batch

__all__ = ["BatchIndexer", "IndexedBatch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IndexedBatch:
    """What the oracle keeps of a batch while it waits to be planned.

    Attributes:
        batch_index: the batch.
        unique: distinct rows of the global batch.
        whole: the index of the batch if there is one rank; else None.
        shares: by rank, if there are several; else empty.
    """

    batch_index: int
    unique: RowList
    whole: BatchIndex | None
    shares: tuple[Share, ...]


class BatchIndexer:
    """Batches come in order, one by one: with several ranks the assignment may depend on those before."""

    def __init__(self, spec: OracleSpec) -> None:
        self._spec = spec
        self._indexer = Indexer(spec)
        self._assigner = ASSIGNERS[spec.assign](spec) if spec.world_size > 1 else None

    @property
    def learns(self) -> bool:
        """How a batch is split depends on those before: to begin in the middle, they must be taken too."""
        return self._assigner is not None and self._assigner.learns

    def take(self, batch: Batch) -> IndexedBatch:
        """Index and split a batch.

        Raises:
            InputError: an id outside its table.
        """
        index = self._indexer.index(batch)
        if self._assigner is None:
            return IndexedBatch(batch_index=batch.index, unique=index.unique, whole=index, shares=())
        shares = split(batch, self._spec, index, self._assigner.assign(batch, index))
        self._assigner.learn(index, shares)
        return IndexedBatch(batch_index=batch.index, unique=index.unique, whole=None, shares=shares)
