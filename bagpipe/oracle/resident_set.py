"""One rank's cache slots: which are free, and whose row leaves when room is needed.

    make_room(misses) ─> victims: idle rows, lowest score first; then farthest next use
    release(slots)    ─> free ─> take(count)
    expect(slots, b)  <─ batch b entered the window and uses them

Rows of the previous batch change until that batch's update: evicting one makes the insert wait for the update. Most
victims are such rows: used once, never again in sight. They are *leaving*: chosen as ever, but evicted with the next
batch's victims, and the insert takes spare slots meanwhile. If that batch uses one, it stays. If more rows would leave
than there are spare slots, rows that neither batch uses make room for the rest, which costs reads of those needed
again. Only if there are too few of them, all leaving rows are evicted at once, and the insert waits.

With *rows_delay* 1 the batch before is still under way when rows leave: its rows are *held*, and the previous batch is
the one before it.

A cache that *grows* adds rows instead of evicting ones that the window uses, or more rows of the previous batch than
there are spare slots: after that, victims are idle rows that wait for nothing. Its slots keep their numbers.

Most rows of a batch are needed again soon and are never evicted, so only rows whose next use lies beyond a *horizon*
are queued. If those do not suffice, all slots are queued once and the horizon halves. The victims are the same.

Idle rows leave by their scores, or with `OracleSpec.horizon` log by their next use in the whole log, farthest first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.assembly import located, positions_by_rank
from bagpipe.oracle.eviction import NEVER, NEVER_PRIORITY, POLICIES, EvictionQueue, idle_priority
from bagpipe.oracle.far_queue import FarQueue, far_priority
from bagpipe.oracle.lrfu import NO_SCORE
from bagpipe.oracle.plan import NO_BATCH, OracleSpec, slots_of, spare_slots

__all__ = ["ResidentSet", "SlotState", "UsedSlots", "Victims"]


@dataclass(frozen=True, slots=True, eq=False)
class SlotState:
    """The planner's state of each slot of one or more ranks.

    Attributes:
        handle: int64, the row in the slot, -1 if it is free.
        next_use: int32, the next batch that uses the row, `NEVER` if the row is idle.
        idle_key: int32, the row's score, see `bagpipe.oracle.lrfu`. With the horizon `log`: the next batch of the log
            that uses the row, `NEVER` if there is none.
    """

    handle: NDArray[np.int64]
    next_use: NDArray[np.int32]
    idle_key: NDArray[np.int32]

    @classmethod
    def empty(cls, num_slots: int) -> SlotState:
        """State of slots that do not exist yet: it takes memory when a `ResidentSet` fills it."""
        return cls(np.empty(num_slots, np.int64), np.empty(num_slots, np.int32), np.empty(num_slots, np.int32))

    def fill(self, start: int, stop: int) -> None:
        """Make slots `start` to `stop` free ones."""
        self.handle[start:stop] = -1
        self.next_use[start:stop] = NEVER
        self.idle_key[start:stop] = NO_SCORE

    def part(self, start: int, stop: int) -> SlotState:
        """A view of slots `start` to `stop`."""
        return SlotState(self.handle[start:stop], self.next_use[start:stop], self.idle_key[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victims:
    """Slots to empty.

    Attributes:
        slots: int64.
        after: as `OwnerPlan.evict_after`. num_waiting: as `OwnerPlan.evict_waiting`.
    """

    slots: NDArray[np.int64]
    after: int
    num_waiting: int


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """A rank's rows of a batch: slots, and next uses as known at planning."""

    slots: NDArray[np.int64]
    next_use: NDArray[np.int32]


class UsedSlots:
    """The slots that a batch uses, of all ranks. They are split by rank when that is asked for.

    Args:
        slots: int64, numbered ``owner * slots_per_rank + slot``.
        next_use: int32, the next use of each row as known at planning.
        spec: of the planner.
    """

    def __init__(self, slots: NDArray[np.int64], next_use: NDArray[np.int32], spec: OracleSpec) -> None:
        self._slots = slots
        self._next_use = next_use
        self._spec = spec
        self._beyond: dict[int, UsedSlots] = {}  # by batch; ranks differ by how often their horizons have halved

    @cached_property
    def _located(self) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
        return located(self._slots, self._spec)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 ``[ranks]``: the slots of each rank."""
        return np.bincount(self._located[0], minlength=self._spec.world_size)

    @cached_property
    def by_rank(self) -> tuple[_Uses, ...]:
        """By rank, its slots in their order, numbered within the rank."""
        if self._spec.world_size == 1:
            return (_Uses(self._slots, self._next_use),)
        owners, local = self._located
        return tuple(
            _Uses(local.take(positions), self._next_use.take(positions))
            for positions in positions_by_rank(owners, self._spec.world_size)
        )

    def beyond(self, batch_index: int) -> UsedSlots:
        """The slots whose rows are used after a batch, not up to it. Made once for ranks that ask for the same."""
        if batch_index not in self._beyond:
            far = np.flatnonzero(self._next_use > batch_index)
            self._beyond[batch_index] = UsedSlots(self._slots.take(far), self._next_use.take(far), self._spec)
        return self._beyond[batch_index]


class ResidentSet:
    """The rows resident at one rank. Slots are numbered from 0 on every rank.

    Args:
        state: the rank's slots. The planner updates `next_use` and `idle_key`.
        rank: this one.

    Attributes:
        num_rows: cache rows that have slots. At most `OracleSpec.num_slots`, and less only while the cache grows.
        num_slots_used: as `OwnerPlan.num_slots`.
    """

    def __init__(self, spec: OracleSpec, state: SlotState, rank: int = 0) -> None:
        self._state = state
        self._rank = rank
        self._policy = POLICIES[spec.policy]
        self._sees_log = spec.horizon == "log"
        self._queue = FarQueue(0) if self._sees_log else EvictionQueue(0)
        self._horizon = spec.lookahead * 7 // 8
        self._most_rows = spec.num_slots
        self._num_slots = self._num_free = self._spare_slots = 0
        self._free = np.empty(spec.slots_per_rank, dtype=np.int32)
        self._leaving = np.empty(0, dtype=np.int64)
        self._rows_delay = spec.rows_delay
        nothing = UsedSlots(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32), spec)
        # Of the latest batches, oldest first: the previous one, then those whose rows are held.
        self._latest = deque([nothing] * (1 + spec.rows_delay), maxlen=1 + spec.rows_delay)
        self.num_rows = self.num_slots_used = 0
        if not spec.grows:
            self.grow(spec.num_slots)

    @property
    def num_resident(self) -> int:
        """Rows in the cache."""
        return self._num_slots - self._num_free

    def grow(self, num_rows: int) -> int:
        """Make slots for `num_rows` cache rows, at most for those of the spec. Returns the rows added."""
        more = min(num_rows, self._most_rows) - self.num_rows
        if more <= 0:
            return 0
        first, self.num_rows = self._num_slots, self.num_rows + more
        self._num_slots, self._spare_slots = slots_of(self.num_rows), spare_slots(self.num_rows)
        added = self._num_slots - first
        self._state.fill(first, self._num_slots)
        self._queue.grow(self._num_slots)
        # The free slot that is taken next is the last one.
        self._free[self._num_free : self._num_free + added] = np.arange(self._num_slots - 1, first - 1, -1)
        self._num_free += added
        return more

    def num_held(self, used: UsedSlots) -> int:
        """Slots whose rows may not leave yet, beside those that the next planned batch uses.

        Args:
            used: as in `make_room`.
        """
        held = self._held()
        return int(held.shape[0] - np.count_nonzero(self._queue.are_among(self._own(used), held)))

    def expect(self, slots: NDArray[np.int64], batch_index: int) -> None:
        """The batch that just entered the window uses these slots, whose rows were idle."""
        slots = slots[self._queue.is_queued(slots)]
        self._queue.push(slots, np.full(slots.shape[0], batch_index, dtype=np.int32))

    def make_room(self, count: int, now: int, used: UsedSlots) -> Victims:
        """The slots to empty so that `count` are free.

        Args:
            count: rows that enter the cache for batch `now`.
            used: slots that batch `now` uses. Until it is planned, they are those with this next use.
        """
        self._queue.advance(now)
        left = self._leaving[self._state.next_use.take(self._leaving) != now]
        victims = [self._queue.pop_idle()] if self._policy.drop_idle else []
        room = self._num_free + left.shape[0] - self._spare_slots
        short = count - room - sum(part.shape[0] for part in victims)
        previous = self._enqueue_previous(now, beyond=now + self._horizon)
        if short > 0 and self.num_rows < self._most_rows:
            victims.append(self._queue.pop(short, min_priority=NEVER_PRIORITY))
            short -= victims[-1].shape[0]
            short -= self.grow(self.num_rows + short)
        if short > 0:
            victims.append(self._queue.pop(short, min_priority=now + self._horizon))
            short -= victims[-1].shape[0]
        if short > 0:
            previous = self._own(self._latest[0])
            self._enqueue_all_but(np.concatenate([self._own(used), self._held(), left, *victims]))
            victims.append(self._queue.pop(short))
        return self._victims(np.concatenate([left, *victims]), previous, count, now, used)

    def _victims(
        self,
        chosen: NDArray[np.int64],
        previous: NDArray[np.int64],
        count: int,
        now: int,
        used: UsedSlots,
    ) -> Victims:
        """Those of the chosen slots that are emptied now; the others are leaving.

        Args:
            chosen: slots whose rows leave.
            previous: slots of the previous batch's rows among which there may be chosen ones.
            count, now, used: as in `make_room`.
        """
        is_late = self._queue.are_among(chosen, previous)
        num_late = int(np.count_nonzero(is_late))
        if num_late > self._spare_slots:
            spared = np.flatnonzero(is_late)[: self.grow(self.num_rows + num_late - self._spare_slots)]
            self._enqueue(chosen.take(spared), now)
            chosen, is_late = np.delete(chosen, spared), np.delete(is_late, spared)
            num_late -= spared.shape[0]
        waits = False
        if num_late > self._spare_slots:
            short = count - self._num_free - (chosen.shape[0] - num_late)
            kept = np.concatenate([self._own(used), self._held(), self._own(self._latest[0]), chosen])
            earlier = self._take_earlier(short, kept)
            waits = earlier.shape[0] < short
            chosen = np.concatenate([chosen, earlier])
            is_late = np.concatenate([is_late, np.zeros(earlier.shape[0], dtype=np.bool_)])
        self._leaving = chosen[is_late & (not waits)]
        evicted = chosen[~is_late | waits]
        if not evicted.shape[0]:
            return Victims(slots=evicted, after=NO_BATCH, num_waiting=0)
        latest = now - 1 - self._rows_delay
        after = max(latest if waits else latest - 1, NO_BATCH)
        return Victims(slots=evicted, after=after, num_waiting=num_late if waits else 0)

    def drop(self, slots: NDArray[np.int64]) -> None:
        """Free the slots of rows that expired. None of them is of a batch whose rows may be under way (`LEAST_GAP`)."""
        self._queue.remove(slots)
        self.release(slots)

    def release(self, slots: NDArray[np.int64]) -> None:
        """Free these slots."""
        self._free[self._num_free : self._num_free + slots.shape[0]] = slots
        self._num_free += slots.shape[0]

    def take(self, count: int) -> NDArray[np.int64]:
        """Allocate `count` free slots."""
        slots = self._free[self._num_free - count : self._num_free][::-1].astype(np.int64)
        self._num_free -= count
        if count:
            self.num_slots_used = max(self.num_slots_used, int(slots.max()) + 1)
        return slots

    def use(self, used: UsedSlots) -> None:
        """The batch just planned uses these slots; the next uses follow it."""
        self._latest.append(used)

    def _own(self, used: UsedSlots) -> NDArray[np.int64]:
        return used.by_rank[self._rank].slots

    def _held(self) -> NDArray[np.int64]:
        """The slots that may not be emptied, beside those of the batch being planned."""
        return self._own(self._latest[-1]) if self._rows_delay else np.empty(0, dtype=np.int64)

    def _enqueue_previous(self, now: int, beyond: int) -> NDArray[np.int64]:
        """Queue the previous batch's rows with a next use after batch `beyond`. Returns their slots."""
        slots, held = self._own(self._latest[0].beyond(beyond)), self._held()
        if held.shape[0]:
            slots = slots[~self._queue.are_among(slots, held)]
        # A batch that entered the window since, or this batch itself, can be the next use of a row that had none.
        self._enqueue(slots, now)
        return slots

    def _enqueue(self, slots: NDArray[np.int64], now: int) -> None:
        """Queue rows by their next uses, idle ones by their scores; those that batch `now` uses are left out."""
        next_use = self._state.next_use.take(slots)
        is_idle = next_use == NEVER
        idle = slots[is_idle]
        self._queue.push(idle, self._idle_priority(idle))
        later = ~is_idle & (next_use != now)
        self._queue.push(slots[later], next_use[later])

    def _idle_priority(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32: the priorities of rows, as far as they are idle."""
        scores = self._state.idle_key.take(slots)
        return far_priority(scores) if self._sees_log else idle_priority(scores)

    def _take_earlier(self, count: int, spared: NDArray[np.int64]) -> NDArray[np.int64]:
        """The `count` slots, but for the spared ones, whose rows are needed last; none if there are fewer."""
        slots = self._all_but(spared)
        if count <= 0 or slots.shape[0] < count:
            return slots[:0]
        next_use = self._state.next_use.take(slots)
        priority = np.where(next_use == NEVER, self._idle_priority(slots), next_use)
        slots = slots.take(np.argsort(-priority, kind="stable")[:count])
        self._queue.remove(slots)
        return slots

    def _enqueue_all_but(self, spared: NDArray[np.int64]) -> None:
        """Queue every resident row except the spared ones. Idle rows are queued already."""
        self._horizon //= 2
        slots = self._all_but(spared)
        slots = slots[~self._queue.is_queued(slots)]
        self._queue.push(slots, self._state.next_use[slots])

    def _all_but(self, spared: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots of all resident rows except the spared ones, ascending."""
        others = self._state.handle[: self._num_slots] >= 0
        others[spared] = False
        return np.flatnonzero(others)
