"""The planner: batches go in, plans come out `lookahead - 1` batches later.

    push(batch) ─> index, split over the ranks ─> window: this batch becomes the *next use* of each row's previous use
    plan()      ─> oldest batch: hits keep owner and slot; each miss gets an owner (the rank that uses it most)
                   and there a free slot, or the slot of a victim

State is O(window + cache): arrays by handle and by slot. Plans are a pure function of the batches and the `OracleSpec`.
Slots are numbered ``owner * slots_per_rank + slot`` here; plan records hold `slot` alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import CapacityError
from bagpipe.oracle.assembly import Decision, GlobalRows, SlottedRows, located, positions_by_rank, select_rows
from bagpipe.oracle.batch_indexer import BatchIndexer, Indexes
from bagpipe.oracle.batch_window import BatchWindow, OldestBatch, RowsHeld, Window
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.expired import ExpiredOfRank, empty_slots, split_expired, with_expired
from bagpipe.oracle.handles import grown, make_handles
from bagpipe.oracle.lrfu import LrfuClock
from bagpipe.oracle.placement import place_rows
from bagpipe.oracle.plan import NO_BATCH, CachePlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.resident_set import ResidentSet, SlotState, UsedSlots
from bagpipe.oracle.spec_check import check_spec
from bagpipe.oracle.window import RankCounts, UnseenUses
from bagpipe.types.batch import Batch

__all__ = ["Planner", "make_planner", "plan_batches", "plans_of"]

#: A cache that grows has room for at least so many batches as large as the largest one so far.
GROWN_BATCHES = 4


class Planner:
    """Plans the caches of all ranks from a window of batches. `spec.num_slots` must be at least 1.

    Args:
        spec: what to plan for.
        indexer: of the batches; None: they are indexed here.
        window: of the batches; None: it runs here.
    """

    def __init__(self, spec: OracleSpec, indexer: Indexes | None = None, window: Window | None = None) -> None:
        self.spec = spec
        self._indexer = BatchIndexer(spec) if indexer is None else indexer
        self._window: Window = BatchWindow(spec, make_handles(spec.table_rows)) if window is None else window
        self._handles = self._window.handles
        self._rank_counts = RankCounts(spec.world_size, largest=spec.lookahead)
        # By handle.
        num_handles = self._window.num_handles
        self._slot_of_handle = np.full(num_handles, -1, dtype=np.int32)
        self._evicted_at = np.full(num_handles, NO_BATCH, dtype=np.int32)
        # By slot.
        num_slots = spec.slots_per_rank * spec.world_size
        self._slot_state = SlotState.empty(num_slots)
        self._clock = LrfuClock(0 if spec.grows else spec.num_slots * spec.world_size)
        self._largest = 0  # unique rows of a batch pushed so far
        self._rows = RowsHeld(spec)
        self._unseen, self._is_blind = UnseenUses(spec.lookahead), False
        self._marks = np.zeros(num_slots if spec.world_size > 1 else 0, dtype=np.bool_)
        self._used_slots = np.empty(0, dtype=np.int64)  # by the batch planned last
        # By rank.
        each = spec.slots_per_rank
        parts = (self._slot_state.part(base, base + each) for base in range(0, num_slots, each))
        self._resident_sets = tuple(ResidentSet(spec, part, rank) for rank, part in enumerate(parts))

    @property
    def num_resident(self) -> int:
        """Rows in the caches after the last plan."""
        return sum(resident_set.num_resident for resident_set in self._resident_sets)

    @property
    def learns(self) -> bool:
        """See `BatchIndexer.learns`."""
        return self._indexer.learns

    @property
    def is_ready(self) -> bool:
        """The window is full: the oldest batch can be planned with its whole lookahead."""
        return len(self._window) >= self.spec.lookahead

    def push(self, batch: Batch) -> None:
        """Add a batch to the window. Batches come in order.

        Raises:
            CapacityError: the batch has more unique rows than the caches have slots, those of the batch before counted
                if they are held (`OracleSpec.rows_delay`).
            InputError: an id outside its table.
        """
        indexed = self._indexer.index(batch)
        num_unique, num_slots = len(indexed.unique), self.spec.num_slots * self.spec.world_size
        num_held = self._rows.num_held(indexed)
        if num_unique + num_held > num_slots:
            raise self._no_room(batch, num_unique, num_held)
        self._largest = max(self._largest, num_unique)
        self._rows.add(indexed)
        new = self._window.enter(indexed)
        if self._window.num_handles > self._slot_of_handle.shape[0]:
            self._grow(self._window.num_handles)
        slots = self._slot_of_handle.take(new)
        self._expect(slots[slots >= 0].astype(np.int64), batch.index)

    def num_held(self, batch: Batch) -> int:
        """Rows of the batch pushed last that a batch which is not added does not use, if they are held; else 0.

        Raises:
            InputError: an id outside its table.
        """
        return self._rows.num_held(self._indexer.index(batch)) if self.spec.rows_delay else 0

    def _no_room(self, batch: Batch, num_unique: int, num_held: int) -> CapacityError:
        size, of = self.spec.num_slots * self.spec.world_size, self.spec
        return CapacityError.of_batch(
            batch.index, num_unique, num_slots=size, world_size=of.world_size, num_held=num_held, grows=of.grows
        )

    def pass_over(self, batch: Batch) -> None:
        """Learn from a batch before the first planned one. See `BatchIndexer.learns`.

        Raises:
            InputError: an id outside its table.
        """
        self._indexer.index(batch)

    def num_unique(self, batch: Batch) -> int:
        """Unique rows of a batch that is not added: the slots it needs.

        Raises:
            InputError: an id outside its table.
        """
        return self._indexer.num_unique(batch)

    def plan(self, *, more_follow: bool = False) -> CachePlan:
        """Remove the oldest batch from the window and plan it. See `decide`."""
        return self.decide(more_follow=more_follow).plan()

    def decide(self, *, more_follow: bool = False) -> Decision:
        """Remove the oldest batch from the window and decide all of its plan. IndexError if the window is empty.

        Args:
            more_follow: batches can follow those in a window that is not full: they have not arrived.
        """
        batch = self._window.oldest()
        indexed, handles, now = batch.indexed, batch.handles, batch.indexed.batch_index
        self._unseen.plan(now, batch.last_index)
        # With a window of one batch the next batch is unknown, so any row can be in it.
        self._is_blind = self.spec.lookahead == 1 or (more_follow and len(self._window) == 1)
        dropped = None if indexed.expired is None else self._drop(indexed.expired)
        slots = self._slot_of_handle.take(handles).astype(np.int64)
        missing = np.flatnonzero(slots < 0)
        if self.spec.grows:
            self._reserve()
        hits = slots.take(np.flatnonzero(slots >= 0))
        used = UsedSlots(hits, np.broadcast_to(np.int32(now), hits.shape), self.spec)
        misses_of_ranks = self._place(missing, used)
        next_use = self._window.leave()
        fetch_new = np.zeros(slots.shape[0], dtype=np.bool_)
        fetch_new[missing], scores = self._handles.admit(handles.take(missing))
        if indexed.is_born is not None:
            fetch_new = indexed.is_born
            self._evicted_at[handles[fetch_new]] = NO_BATCH

        owners = self._fill(batch, slots, used, misses_of_ranks, fetch_new)
        self._slot_state.next_use[slots] = next_use
        if indexed.next_use is None:
            self._slot_state.idle_key[slots[missing]] = scores
            self._slot_state.idle_key[slots] = self._clock.use(self._slot_state.idle_key.take(slots))
        else:
            self._slot_state.idle_key[slots] = indexed.next_use
        if dropped is not None:
            owners = with_expired(owners, dropped, now)
        return Decision(indexed=indexed, rows=self._describe(now, slots, missing, next_use), owners=owners)

    def _drop(self, expired: RowList) -> tuple[ExpiredOfRank, ...]:
        """Empty the slots of rows that expired. By rank: those that it deletes, and their slots."""
        slots, idle = empty_slots(expired, self._handles, self._slot_of_handle, self._slot_state)
        self._window.release(idle)
        for resident_set, own in zip(self._resident_sets, self._by_rank(slots[slots >= 0]), strict=True):
            resident_set.drop(own)
        return split_expired(expired, slots, self.spec)

    def _reserve(self) -> None:
        """Let the caches grow to the rows of a few batches."""
        rows = -(-GROWN_BATCHES * self._largest // self.spec.world_size)
        for resident_set in self._resident_sets:
            resident_set.grow(rows)
        self._clock.grow(sum(resident_set.num_rows for resident_set in self._resident_sets))

    def _expect(self, slots: NDArray[np.int64], batch_index: int) -> None:
        """The batch that just entered the window uses these slots, whose rows were idle."""
        self._slot_state.next_use[slots] = batch_index
        for resident_set, own in zip(self._resident_sets, self._by_rank(slots), strict=True):
            resident_set.expect(own, batch_index)

    def _by_rank(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """By rank, its slots among these, in their order and numbered within the rank."""
        if self.spec.world_size == 1:
            return (slots,)
        owners, local = located(slots, self.spec)
        return tuple(local.take(positions) for positions in positions_by_rank(owners, self.spec.world_size))

    def _place(self, missing: NDArray[np.int64], used: UsedSlots) -> tuple[NDArray[np.int64], ...]:
        """By rank: the missing rows it will own, ascending positions among the unique rows. `used`: those in slots."""
        world_size = self.spec.world_size
        if world_size == 1:
            return (missing,)
        words = self._window.uses_of(missing)
        load = np.array([resident_set.num_resident for resident_set in self._resident_sets])
        room = self.spec.num_slots - used.counts
        if self.spec.rows_delay:
            room -= [resident_set.num_held(used) for resident_set in self._resident_sets]
        room = np.maximum(room, 0)  # rows that were leaving can be used again
        owners = place_rows(self._rank_counts.unpack(words), load, room)
        return tuple(missing.take(positions) for positions in positions_by_rank(owners, world_size))

    def _fill(
        self,
        batch: OldestBatch,
        slots: NDArray[np.int64],
        used: UsedSlots,
        misses_of_ranks: tuple[NDArray[np.int64], ...],
        fetch_new: NDArray[np.bool_],
    ) -> tuple[OwnerPlan, ...]:
        """Make room at every rank and insert its missing rows. Writes their slots into `slots`."""
        now, each = batch.indexed.batch_index, self.spec.slots_per_rank
        victims = [
            resident_set.make_room(misses.shape[0], now, used)
            for resident_set, misses in zip(self._resident_sets, misses_of_ranks, strict=True)
        ]
        evicted = self._evict([one.slots + rank * each for rank, one in enumerate(victims)], now)
        owners = []
        for rank, (resident_set, misses) in enumerate(zip(self._resident_sets, misses_of_ranks, strict=True)):
            evict, emptied = evicted[rank]
            resident_set.release(emptied)
            handles = batch.handles.take(misses)
            is_new = fetch_new.take(misses)
            fetch_slots = resident_set.take(misses.shape[0])
            slots[misses] = self._slot_of_handle[handles] = inserted = fetch_slots + rank * each
            self._slot_state.handle[inserted] = handles
            owners.append(
                OwnerPlan(
                    fetch=select_rows(batch.indexed.unique, misses),
                    fetch_slots=fetch_slots.astype(np.int32),
                    fetch_new=is_new,
                    evict=evict,
                    evict_slots=emptied.astype(np.int32),
                    evict_after=victims[rank].after,
                    evict_waiting=victims[rank].num_waiting,
                    fetch_after=self._fetch_after(handles[~is_new]),
                    num_slots=resident_set.num_slots_used,
                )
            )
        return tuple(owners)

    def _evict(self, slots_of_ranks: list[NDArray[np.int64]], now: int) -> list[tuple[RowList, NDArray[np.int64]]]:
        """Empty the slots. By rank: their rows by table, and the slots in that order, numbered within the rank."""
        num_tables, world_size = len(self.spec.table_rows), self.spec.world_size
        counts = [slots.shape[0] for slots in slots_of_ranks]
        slots = np.concatenate(slots_of_ranks)
        handles = self._slot_state.handle.take(slots)
        tables, ids = self._handles.rows(handles)
        groups = tables + np.repeat(np.arange(world_size) * num_tables, counts) if world_size > 1 else tables
        # A stable sort of 16 bits is a radix sort.
        order = np.argsort(groups.astype(np.uint16) if world_size * num_tables < 1 << 16 else groups, kind="stable")
        handles, slots, ids = handles.take(order), slots.take(order), ids.take(order)
        sizes = np.bincount(groups, minlength=world_size * num_tables).reshape(world_size, num_tables)
        table_offsets = np.zeros((world_size, num_tables + 1), dtype=np.int64)
        np.cumsum(sizes, axis=1, out=table_offsets[:, 1:])

        self._slot_state.handle[slots] = -1
        self._slot_of_handle[handles] = -1
        remembered = self._slot_state.next_use.take(slots) != NEVER
        self._evicted_at[handles[remembered]] = now
        if self.spec.horizon == "window":
            self._handles.remember(handles, self._slot_state.idle_key.take(slots), counts)
        self._window.release(handles[~remembered])
        slots %= self.spec.slots_per_rank
        ends = np.cumsum(counts).tolist()
        return [
            (RowList(table_offsets=offsets, ids=ids[start:stop]), slots[start:stop])
            for offsets, start, stop in zip(table_offsets, [0, *ends[:-1]], ends, strict=True)
        ]

    def _fetch_after(self, handles: NDArray[np.int64]) -> int:
        """The latest eviction, by any rank, of any of these known rows. That of an idle row is in no record."""
        if not handles.shape[0]:
            return NO_BATCH
        known = int(self._evicted_at[handles].max())
        self._evicted_at[handles] = NO_BATCH
        return max(known, self._unseen.latest)

    def _describe(
        self, now: int, slots: NDArray[np.int64], missing: NDArray[np.int64], next_use: NDArray[np.int32]
    ) -> GlobalRows | SlottedRows:
        """The unique rows. Also tells each rank which of its slots the batch uses."""
        push_now = np.ones(slots.shape[0], dtype=np.bool_) if self._is_blind else next_use == now + 1
        used = UsedSlots(slots, next_use, self.spec)
        for resident_set in self._resident_sets:
            resident_set.use(used)
        if self.spec.world_size == 1:
            owners, none = np.zeros(slots.shape[0], dtype=np.uint16), np.empty(0, dtype=np.bool_)
            return GlobalRows(owners=owners, slots=slots.astype(np.int32), push_now=push_now, pull_now=none, owned=())
        before, self._used_slots = self._used_slots, slots
        return SlottedRows(
            slots=slots,
            missing=missing,
            before=before,
            marks=self._marks,
            push_now=push_now,
            spec=self.spec,
        )

    def _grow(self, num_handles: int) -> None:
        self._slot_of_handle = grown(self._slot_of_handle, num_handles, -1)
        self._evicted_at = grown(self._evicted_at, num_handles, NO_BATCH)


def make_planner(
    spec: OracleSpec, indexer: Indexes | None = None, window: Window | None = None
) -> Planner | DirectPlanner:
    """The planner for a spec: direct mode if it has no slots.

    Args:
        spec: what to plan for.
        indexer: of the batches; None: the planner indexes them.
        window: of the batches; None: the planner runs it. Direct mode has none.

    Raises:
        InputError: see `check_spec`.
    """
    check_spec(spec)
    return Planner(spec, indexer, window) if spec.num_slots else DirectPlanner(spec, indexer)


def plan_batches(batches: Iterable[Batch], spec: OracleSpec) -> Iterator[tuple[Batch, CachePlan]]:
    """Plans of a stream of batches, each with its batch. The end of the stream empties the window."""
    window: deque[Batch] = deque()

    def remembered() -> Iterator[Batch]:
        for batch in batches:
            window.append(batch)
            yield batch

    for plan in plans_of(make_planner(spec), remembered()):
        yield window.popleft(), plan


def plans_of(planner: Planner | DirectPlanner, batches: Iterable[Batch]) -> Iterator[CachePlan]:
    """The plans of `plan_batches` alone. Holds no batches; the planner keeps much less of each."""
    waiting = 0
    for batch in batches:
        planner.push(batch)
        waiting += 1
        if planner.is_ready:
            waiting -= 1
            yield planner.plan()
    for _ in range(waiting):
        yield planner.plan()
