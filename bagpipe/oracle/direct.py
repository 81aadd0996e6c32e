"""Direct mode: no cache. Every batch fetches all its rows, after the batch before has written all of its rows back.

It is the reference that cached training must equal bit for bit, and goes through the same plans and the same engine.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from bagpipe.batch import Batch
from bagpipe.oracle.index import BatchIndex, Indexer
from bagpipe.oracle.plan import CachePlan, ConsumerPlan, OracleSpec, OwnerPlan, RowList

__all__ = ["DirectPlanner"]


class DirectPlanner:
    """Plans without a cache; the same methods as `Planner`."""

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._indexer = Indexer(spec)
        self._window: deque[tuple[int, BatchIndex]] = deque()
        self._previous = RowList(
            table_offsets=np.zeros(len(spec.table_rows) + 1, dtype=np.int64), ids=np.empty(0, dtype=np.int64)
        )
        self._num_slots_used = 0

    @property
    def is_ready(self) -> bool:
        """There is a batch to plan."""
        return bool(self._window)

    def push(self, batch: Batch) -> None:
        """Take a batch. Batches come in order, one by one."""
        self._window.append((batch.index, self._indexer.index(batch)))

    def plan(self) -> CachePlan:
        """Plan the oldest batch. IndexError if there is none."""
        batch_index, index = self._window.popleft()
        num_unique = len(index.unique)
        slots = np.arange(num_unique, dtype=np.int32)
        evict, self._previous = self._previous, index.unique
        self._num_slots_used = max(self._num_slots_used, num_unique)
        owner = OwnerPlan(
            fetch=index.unique,
            fetch_slots=slots,
            fetch_new=np.zeros(num_unique, dtype=np.bool_),
            evict=evict,
            evict_slots=np.arange(len(evict), dtype=np.int32),
            evict_after=batch_index - 1,
            fetch_after=batch_index,
            num_slots=self._num_slots_used,
        )
        consumer = ConsumerPlan(
            unique=index.unique,
            inverse=index.inverse,
            offsets=index.offsets,
            order=index.order,
            slots=slots,
            owners=np.zeros(num_unique, dtype=np.uint16),
            sync_now=np.ones(num_unique, dtype=np.bool_),
        )
        return CachePlan(batch_index=batch_index, consumers=(consumer,), owners=(owner,))
