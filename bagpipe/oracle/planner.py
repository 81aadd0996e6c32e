"""The oracle: batches go in, plans come out `lookahead - 1` batches later.

    push(batch) ─> index ─> window: link each row's previous use to this batch (its *next use*)
    plan()      ─> oldest batch: hits keep their slots; misses get free slots, or those of the rows that
                   are needed last (never one of this batch; one of the batch before only if nothing else is left)

State is O(window + cache): arrays by handle and by slot. Plans are a pure function of the batches and the `OracleSpec`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.batch import Batch
from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.eviction import NEVER, POLICIES, EvictionQueue
from bagpipe.oracle.handles import DenseHandles, HashHandles
from bagpipe.oracle.index import BatchIndex, Indexer
from bagpipe.oracle.plan import NO_BATCH, CachePlan, ConsumerPlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.window import NextUses

__all__ = ["Planner", "make_planner", "plan_batches"]

#: Vocabularies up to this many rows use the dense map (5 B a row: 1.25 GiB at most); larger ones the hash map.
DENSE_ROWS_LIMIT = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class _WindowBatch:
    batch_index: int
    index: BatchIndex
    handles: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """The rows of a planned batch: their slots, and their next uses as known when it was planned."""

    slots: NDArray[np.int64]
    next_use: NDArray[np.int32]


class Planner:
    """Plans the cache of one rank from a window of batches. `spec.num_slots` must be at least 1.

    Most rows of a batch are needed again soon and would never be evicted, so only rows whose next use lies beyond a
    *horizon* are queued for eviction. When those do not suffice, all slots are queued once and the horizon halves;
    the choice is the same either way.
    """

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._policy = POLICIES[spec.policy]
        self._indexer = Indexer(spec)
        self._window: deque[_WindowBatch] = deque()
        self._handles = _make_handles(spec)
        self._handles.on_grow(self._grow)
        # By handle.
        num_handles = self._handles.num_handles
        self._next_uses = NextUses(num_handles)
        self._slot = np.full(num_handles, -1, dtype=np.int32)
        self._evicted_at = np.full(num_handles, NO_BATCH, dtype=np.int32)
        # By slot.
        self._handle_of_slot = np.full(spec.num_slots, -1, dtype=np.int64)
        self._next_use = np.full(spec.num_slots, NEVER, dtype=np.int32)
        self._num_uses = np.zeros(spec.num_slots, dtype=np.uint8)
        self._queue = EvictionQueue(spec.num_slots)
        self._horizon = spec.lookahead * 7 // 8
        self._free = np.arange(spec.num_slots - 1, -1, -1, dtype=np.int64)
        self._num_free = spec.num_slots
        self._previous = _Uses(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))
        self._num_slots_used = 0

    @property
    def num_resident(self) -> int:
        """Rows in the cache after the last plan."""
        return self.spec.num_slots - self._num_free

    @property
    def is_ready(self) -> bool:
        """The window is full: the next batch to be planned sees its whole lookahead."""
        return len(self._window) >= self.spec.lookahead

    def push(self, batch: Batch) -> None:
        """Let a batch into the window. Batches come in order, one by one.

        Raises:
            CapacityError: the batch has more unique rows than the cache has slots.
            InputError: an id outside its table.
        """
        index = self._indexer.index(batch)
        if len(index.unique) > self.spec.num_slots:
            raise CapacityError(
                f"batch {batch.index} needs {len(index.unique)} unique rows but cache.rows is {self.spec.num_slots}: "
                f"raise cache.rows to at least {len(index.unique)}, or lower data.batch_size"
            )
        handles = self._handles.lookup_or_add(index.unique)
        slots = self._slot.take(self._next_uses.enter(handles, batch.index))
        self._expect(slots[slots >= 0].astype(np.int64), batch.index)
        self._window.append(_WindowBatch(batch.index, index, handles))

    def plan(self) -> CachePlan:
        """Plan the oldest batch of the window and let it go. IndexError if the window is empty."""
        batch = self._window.popleft()
        handles, unique, now = batch.handles, batch.index.unique, batch.batch_index
        next_use = self._next_uses.leave(handles)
        slots = self._slot.take(handles).astype(np.int64)
        missing = np.flatnonzero(slots < 0)
        self._queue.advance(now)

        victims, evict_after = self._make_room(missing.shape[0], now, slots)
        evict, evict_slots = self._evict(victims, now)
        new_handles = handles.take(missing)
        fetch_slots = self._insert(new_handles)
        slots[missing] = fetch_slots
        self._next_use[slots] = next_use
        num_uses = self._num_uses.take(slots)
        self._num_uses[slots] = num_uses + (num_uses < 255)
        self._previous = _Uses(slots, next_use)

        fetch_new = self._handles.first_time(new_handles)
        owner = OwnerPlan(
            fetch=_select(unique, missing),
            fetch_slots=fetch_slots.astype(np.int32),
            fetch_new=fetch_new,
            evict=evict,
            evict_slots=evict_slots.astype(np.int32),
            evict_after=evict_after,
            fetch_after=self._fetch_after(new_handles[~fetch_new], now),
            num_slots=self._num_slots_used,
        )
        return CachePlan(batch_index=now, consumers=(self._consumer(batch, slots, next_use),), owners=(owner,))

    def _consumer(self, batch: _WindowBatch, slots: NDArray[np.int64], next_use: NDArray[np.int32]) -> ConsumerPlan:
        # With a window of one batch the next batch is unknown, so every row may be needed by it.
        blind = self.spec.lookahead == 1
        return ConsumerPlan(
            unique=batch.index.unique,
            inverse=batch.index.inverse,
            offsets=batch.index.offsets,
            order=batch.index.order,
            slots=slots.astype(np.int32),
            owners=np.zeros(slots.shape[0], dtype=np.uint16),
            sync_now=np.ones(slots.shape[0], dtype=np.bool_) if blind else next_use == batch.batch_index + 1,
        )

    def _expect(self, slots: NDArray[np.int64], batch_index: int) -> None:
        """Resident rows that had no use in the window are used by the batch that just entered it."""
        self._next_use[slots] = batch_index
        slots = slots[self._queue.is_queued(slots)]
        self._queue.push(slots, np.full(slots.shape[0], batch_index, dtype=np.int32))

    def _make_room(self, count: int, now: int, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """Slots to empty so that `count` are free, and the batch whose update must be done before they are read.

        Rows of the batch before are spared while others last: their values change until that batch's update, so
        taking one of their slots makes the insert wait for it.
        """
        idle = self._queue.pop_idle() if self._policy.drop_idle else np.empty(0, dtype=np.int64)
        victims = [idle]
        short = count - self._num_free - idle.shape[0]
        if short > 0:
            victims.append(self._queue.pop(short, min_rank=now + self._horizon))
            short -= victims[-1].shape[0]
        if short > 0:
            self._enqueue_all_but(np.concatenate([slots[slots >= 0], self._previous.slots, *victims]))
            victims.append(self._queue.pop(short))
            short -= victims[-1].shape[0]
        self._enqueue_previous(now, beyond=now if short > 0 else now + self._horizon)
        latest = now - 2
        if short > 0:
            victims.append(self._queue.pop(short))
            latest = now - 1
        chosen = np.concatenate(victims)
        return chosen, max(latest, NO_BATCH) if chosen.shape[0] else NO_BATCH

    def _enqueue_previous(self, now: int, beyond: int) -> None:
        """Queue those rows of the batch before whose next use lies after batch `beyond`."""
        far = np.flatnonzero(self._previous.next_use > beyond)
        slots = self._previous.slots.take(far)
        # Where the window knew no next use, a batch that entered it since may have one; not least this very batch.
        next_use = self._next_use.take(slots)
        is_idle = next_use == NEVER
        idle = slots[is_idle]
        self._queue.push(idle, self._policy.idle_rank(now - 1, self._num_uses.take(idle)))
        later = ~is_idle & (next_use != now)
        self._queue.push(slots[later], next_use[later])

    def _enqueue_all_but(self, spared: NDArray[np.int64]) -> None:
        """Queue every resident row, however soon it is needed, but the spared ones. Idle rows are queued already."""
        self._horizon //= 2
        others = self._handle_of_slot >= 0
        others[spared] = False
        slots = np.flatnonzero(others)
        slots = slots[~self._queue.is_queued(slots)]
        self._queue.push(slots, self._next_use[slots])

    def _evict(self, slots: NDArray[np.int64], now: int) -> tuple[RowList, NDArray[np.int64]]:
        """Empty the slots; the rows they held, by table, and the slots in that order."""
        handles = self._handle_of_slot.take(slots)
        tables, ids = self._handles.rows(handles)
        by_table = np.argsort(tables, kind="stable")
        handles, slots, ids = handles[by_table], slots[by_table], ids[by_table]
        table_offsets = np.zeros(len(self.spec.table_rows) + 1, dtype=np.int64)
        np.cumsum(np.bincount(tables, minlength=len(self.spec.table_rows)), out=table_offsets[1:])
        rows = RowList(table_offsets=table_offsets, ids=ids)

        self._handle_of_slot[slots] = -1
        self._slot[handles] = -1
        remembered = self._next_use.take(slots) != NEVER
        self._evicted_at[handles[remembered]] = now
        self._handles.release(handles[~remembered])
        self._free[self._num_free : self._num_free + slots.shape[0]] = slots
        self._num_free += slots.shape[0]
        return rows, slots

    def _insert(self, handles: NDArray[np.int64]) -> NDArray[np.int64]:
        """Give these rows free slots."""
        count = handles.shape[0]
        slots = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self._slot[handles] = slots
        self._handle_of_slot[slots] = handles
        self._num_uses[slots] = 0
        if count:
            self._num_slots_used = max(self._num_slots_used, int(slots.max()) + 1)
        return slots

    def _fetch_after(self, handles: NDArray[np.int64], now: int) -> int:
        """The latest eviction of any of these rows, all planned before.

        A row evicted with no use in the window was forgotten; but then its next use lay a whole window later, so its
        eviction was at ``now - lookahead`` at the latest.
        """
        if not handles.shape[0]:
            return NO_BATCH
        known = int(self._evicted_at[handles].max())
        self._evicted_at[handles] = NO_BATCH
        return max(known, now - self.spec.lookahead, NO_BATCH)

    def _grow(self, num_handles: int) -> None:
        self._next_uses.grow(num_handles)
        self._slot = _grown(self._slot, num_handles, -1)
        self._evicted_at = _grown(self._evicted_at, num_handles, NO_BATCH)


def make_planner(spec: OracleSpec) -> Planner | DirectPlanner:
    """The planner for a spec: direct mode if it has no slots.

    Raises:
        InputError: the spec cannot be planned for.
    """
    if spec.policy not in POLICIES:
        raise InputError(f"oracle.policy must be one of {', '.join(sorted(POLICIES))}, got {spec.policy!r}")
    if spec.lookahead < 1:
        raise InputError(f"oracle.lookahead must be at least 1, got {spec.lookahead}")
    if spec.num_slots < 0:
        raise InputError(f"cache.rows must be at least 0, got {spec.num_slots}")
    if spec.world_size != 1:
        raise InputError(f"the cache is planned for one trainer rank so far, got a world size of {spec.world_size}")
    tables = [ref.table for ref in spec.features]
    if tables != sorted(tables):
        raise InputError(f"features must be sorted by table number, got {tables}")
    return Planner(spec) if spec.num_slots else DirectPlanner(spec)


def plan_batches(batches: Iterable[Batch], spec: OracleSpec) -> Iterator[tuple[Batch, CachePlan]]:
    """Plans of a stream of batches, each with its batch; at the end of the stream the window runs empty."""
    planner = make_planner(spec)
    window: deque[Batch] = deque()
    for batch in batches:
        planner.push(batch)
        window.append(batch)
        if planner.is_ready:
            yield window.popleft(), planner.plan()
    while window:
        yield window.popleft(), planner.plan()


def _select(rows: RowList, positions: NDArray[np.int64]) -> RowList:
    """The rows at these ascending positions."""
    return RowList(
        table_offsets=np.searchsorted(positions, rows.table_offsets).astype(np.int64), ids=rows.ids[positions]
    )


def _grown(array: NDArray[np.int32], size: int, fill: int) -> NDArray[np.int32]:
    new = np.full(size, fill, dtype=np.int32)
    new[: array.shape[0]] = array
    return new


def _make_handles(spec: OracleSpec) -> DenseHandles | HashHandles:
    bounded = tuple(rows for rows in spec.table_rows if rows is not None)
    if len(bounded) == len(spec.table_rows) and sum(bounded) <= DENSE_ROWS_LIMIT:
        return DenseHandles(bounded)
    return HashHandles()
