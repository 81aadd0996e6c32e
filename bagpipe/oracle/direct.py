"""Direct mode: no cache. Every batch fetches all its rows after the previous batch has written back all of its rows.

Cached training must equal direct mode bit for bit. Both use the same plans and the same engine. A row's owner is the
rank that uses it most in the batch. Every row comes from the store after the previous batch's write-back, so no pull
waits for an update and `pull_now` is all False. Where `dense_sizes` allows, the planner remembers which rows were
planned: a rank can then tell that a row that another rank wrote must exist.

With `OracleSpec.rows_delay` 1 the previous batch is under way when a batch is looked up: its rows stay, with owner and
slot, and the batch before it is the one whose rows are written back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import Decision, GlobalRows, places_among, positions_by_rank, select_rows
from bagpipe.oracle.batch_indexer import BatchIndexer, IndexedBatch, Indexes
from bagpipe.oracle.expired import split_expired, with_expired
from bagpipe.oracle.handles import DenseHandles, dense_sizes
from bagpipe.oracle.plan import NO_BATCH, CachePlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.rank_index import busiest_ranks
from bagpipe.types.batch import Batch

__all__ = ["DirectPlanner"]


class DirectPlanner:
    """Plans without a cache. Same arguments and methods as `Planner`."""

    def __init__(self, spec: OracleSpec, indexer: Indexes | None = None) -> None:
        self.spec = spec
        self._indexer = BatchIndexer(spec) if indexer is None else indexer
        self._window: deque[IndexedBatch] = deque()
        nothing = RowList(
            table_offsets=np.zeros(len(spec.table_rows) + 1, dtype=np.int64), ids=np.empty(0, dtype=np.int64)
        )
        none = np.empty(0, dtype=np.int32)
        # Rows in slots: of the latest batches, oldest first, each row at its latest use.
        self._resident = deque([_Homes(nothing, none.astype(np.uint16), none)] * (1 + spec.rows_delay))
        # By rank: slots without a row, ascending, below the number of slots used.
        self._free = [none] * spec.world_size
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

    def plan(self, *, more_follow: bool = False) -> CachePlan:
        """Plan the oldest batch. See `decide`."""
        return self.decide(more_follow=more_follow).plan()

    def decide(self, *, more_follow: bool = False) -> Decision:
        """Decide the plan of the oldest batch, whatever follows. IndexError if there is none."""
        del more_follow  # nothing is known of the next batch
        batch = self._window.popleft()
        unique, num_unique = batch.unique, len(batch.unique)
        leaving = self._resident.popleft()
        evicted = self._evict(leaving)
        if batch.rank_indexes:
            owners = busiest_ranks(batch.rank_indexes, num_unique)
        else:
            owners = np.zeros(num_unique, dtype=np.uint16)
        slots = np.full(num_unique, -1, dtype=np.int32)
        for number, homes in enumerate(self._resident):
            places = places_among(unique, homes.rows)
            staying = np.flatnonzero(places >= 0)
            owners[staying] = homes.owners.take(places[staying])
            slots[staying] = homes.slots.take(places[staying])
            self._resident[number] = homes.without(places[staying])
        is_missing = slots < 0
        owned = positions_by_rank(owners, self.spec.world_size)
        fetched = tuple(positions[is_missing.take(positions)] for positions in owned)
        for rank, positions in enumerate(fetched):
            slots[positions] = self._take_slots(rank, positions.shape[0])
        self._resident.append(_Homes(unique, owners, slots))
        rows = GlobalRows(
            owners=owners,
            slots=slots,
            push_now=np.ones(num_unique, dtype=np.bool_),
            pull_now=np.zeros(num_unique, dtype=np.bool_),
            owned=owned,
        )
        is_new = np.zeros(num_unique, dtype=np.bool_)
        if self._handles is not None:
            is_new, _ = self._handles.admit(self._handles.lookup_or_add(unique))
        if batch.is_born is not None:
            is_new = batch.is_born
        plans = tuple(
            OwnerPlan(
                fetch=select_rows(unique, positions),
                fetch_slots=slots.take(positions),
                fetch_new=is_new.take(positions),
                evict=select_rows(leaving.rows, evicted[rank]),
                evict_slots=leaving.slots.take(evicted[rank]),
                evict_after=max(batch.batch_index - 1 - self.spec.rows_delay, NO_BATCH),
                evict_waiting=evicted[rank].shape[0],
                fetch_after=batch.batch_index,
                num_slots=self._num_slots_used[rank],
            )
            for rank, positions in enumerate(fetched)
        )
        if batch.expired is not None:
            nowhere = np.full(len(batch.expired), -1, dtype=np.int64)
            plans = with_expired(plans, split_expired(batch.expired, nowhere, self.spec), batch.batch_index)
        return Decision(indexed=batch, rows=rows, owners=plans)

    def _evict(self, leaving: _Homes) -> tuple[NDArray[np.int64], ...]:
        """By rank: the positions of its leaving rows. Their slots become free."""
        evicted = positions_by_rank(leaving.owners, self.spec.world_size)
        for rank, positions in enumerate(evicted):
            self._free[rank] = np.sort(np.concatenate([self._free[rank], leaving.slots.take(positions)]))
        return evicted

    def _take_slots(self, rank: int, count: int) -> NDArray[np.int32]:
        """So many free slots of a rank, the lowest ones; new ones if there are too few."""
        free, used = self._free[rank], self._num_slots_used[rank]
        more = max(0, count - free.shape[0])
        free = np.concatenate([free, np.arange(used, used + more, dtype=np.int32)])
        self._num_slots_used[rank] = used + more
        self._free[rank] = free[count:]
        return free[:count]


@dataclass(frozen=True, slots=True, eq=False)
class _Homes:
    """Rows in slots, of all ranks: owner (uint16) and slot (int32) of each."""

    rows: RowList
    owners: NDArray[np.uint16]
    slots: NDArray[np.int32]

    def without(self, places: NDArray[np.int64]) -> _Homes:
        """The others than those at these places."""
        stays = np.ones(len(self.rows), dtype=np.bool_)
        stays[places] = False
        kept = np.flatnonzero(stays)
        return _Homes(select_rows(self.rows, kept), self.owners.take(kept), self.slots.take(kept))
