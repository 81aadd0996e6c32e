"""Direct mode: no cache. Every batch fetches all its rows after the previous batch has written back all of its rows.

Cached training must equal direct mode bit for bit. Both use the same plans and the same engine. A row's owner is the
rank that uses it most in the batch. Every row comes from the store after the previous batch's write-back, so no pull
waits for an update and `pull_now` is all False. Where `dense_sizes` allows, the planner remembers which rows were
planned: a rank can then tell that a row that another rank wrote must exist.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import GlobalRows, assemble, positions_by_rank, select_rows
from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch
from bagpipe.oracle.handles import DenseHandles, dense_sizes
from bagpipe.oracle.plan import CachePlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.rank_index import busiest_ranks
from bagpipe.types.batch import Batch

__all__ = ["DirectPlanner"]


class DirectPlanner:
    """Plans without a cache. Same methods as `Planner`."""

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._indexer = BatchIndexer(spec)
        self._window: deque[IndexedBatch] = deque()
        nothing = RowList(
            table_offsets=np.zeros(len(spec.table_rows) + 1, dtype=np.int64), ids=np.empty(0, dtype=np.int64)
        )
        # By rank.
        self._previous = [nothing] * spec.world_size
        self._num_slots_used = [0] * spec.world_size
        sizes = dense_sizes(spec.table_rows)
        self._handles = None if sizes is None else DenseHandles(sizes)

    @property
    def learns(self) -> bool:
        """See `BatchIndexer.learns`."""
        return self._indexer.learns

    @property
    def is_ready(self) -> bool:
        """A batch is waiting to be planned."""
        return bool(self._window)

    def push(self, batch: Batch) -> None:
        """Add a batch. Batches come in order.

        Raises:
            InputError: an id outside its table.
        """
        self._window.append(self._indexer.index(batch))

    def pass_over(self, batch: Batch) -> None:
        """See `Planner.pass_over`."""
        self._indexer.index(batch)

    def plan(self) -> CachePlan:
        """Plan the oldest batch. IndexError if there is none."""
        batch = self._window.popleft()
        num_unique = len(batch.unique)
        if batch.rank_indexes:
            owners = busiest_ranks(batch.rank_indexes, num_unique)
        else:
            owners = np.zeros(num_unique, dtype=np.uint16)
        owned = positions_by_rank(owners, self.spec.world_size)
        slots = np.empty(num_unique, dtype=np.int32)
        for positions in owned:
            slots[positions] = np.arange(positions.shape[0], dtype=np.int32)
        rows = GlobalRows(
            owners=owners,
            slots=slots,
            push_now=np.ones(num_unique, dtype=np.bool_),
            pull_now=np.zeros(num_unique, dtype=np.bool_),
            owned=owned,
        )
        is_new = np.zeros(num_unique, dtype=np.bool_)
        if self._handles is not None:
            is_new, _ = self._handles.admit(self._handles.lookup_or_add(batch.unique))
        plans = (self._owner(rank, batch, positions, is_new[positions]) for rank, positions in enumerate(owned))
        return assemble(batch, rows, tuple(plans))

    def _owner(
        self, rank: int, batch: IndexedBatch, positions: NDArray[np.int64], is_new: NDArray[np.bool_]
    ) -> OwnerPlan:
        """The record of the rank that owns the unique rows at these positions."""
        fetch = select_rows(batch.unique, positions)
        evict, self._previous[rank] = self._previous[rank], fetch
        self._num_slots_used[rank] = max(self._num_slots_used[rank], len(fetch))
        return OwnerPlan(
            fetch=fetch,
            fetch_slots=np.arange(len(fetch), dtype=np.int32),
            fetch_new=is_new,
            evict=evict,
            evict_slots=np.arange(len(evict), dtype=np.int32),
            evict_after=batch.batch_index - 1,
            fetch_after=batch.batch_index,
            num_slots=self._num_slots_used[rank],
        )
