"""An independent judge of plans: replays them against their batches with dicts and sets, and shares no code with the
planner. Slow on purpose (a Python loop over ids): for tests and for plans under suspicion, not for hot paths.

Each rule is one method; the first one broken raises `PlanError` with the batch, the rule and the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from bagpipe.batch import Batch
from bagpipe.oracle.plan import NO_BATCH, CachePlan, ConsumerPlan, OracleSpec, OwnerPlan, RowList

__all__ = ["PlanError", "Verifier", "verify"]

Row = tuple[int, int]  # (table number, id)


class PlanError(AssertionError):
    """A plan breaks an invariant."""


class Verifier:
    """Feed it every (batch, plan) of a run in order; `finish` checks what only the end of the run shows."""

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self._batch_index = NO_BATCH
        self._slot_of_row: dict[Row, int] = {}
        self._row_in_slot: dict[int, Row] = {}
        self._last_use: dict[Row, int] = {}
        self._last_eviction: dict[Row, int] = {}
        self._sync_now: set[Row] | None = None
        self._previous_rows: set[Row] = set()

    def check(self, batch: Batch, plan: CachePlan) -> None:
        """Replay one batch.

        Raises:
            PlanError: the plan breaks an invariant.
        """
        if not batch.index == plan.batch_index == self._batch_index + 1:
            self._fail(f"expected batch {self._batch_index + 1}, got batch {batch.index} with plan {plan.batch_index}")
        self._batch_index = batch.index
        if len(plan.consumers) != self.spec.world_size or len(plan.owners) != self.spec.world_size:
            self._fail(f"expected one consumer and one owner for each of {self.spec.world_size} ranks")
        rows = self._check_index(batch, plan.consumers[0])
        self._check_sync(rows)
        self._check_evict(plan.owners[0], rows)
        self._check_fetch(plan.owners[0], rows)
        self._check_resident(plan.consumers[0], rows)
        self._last_use.update((row, batch.index) for row in rows)
        self._previous_rows = set(rows)
        self._sync_now = {row for row, now in zip(rows, plan.consumers[0].sync_now.tolist(), strict=True) if now}

    def finish(self) -> None:
        """The run is over: nothing is needed by a next batch."""
        if self.spec.lookahead > 1 and self.spec.num_slots and self._sync_now:
            self._fail("rows are marked as needed by the next batch, but there is none")

    def _check_index(self, batch: Batch, consumer: ConsumerPlan) -> list[Row]:
        occurrences = _occurrences(batch, self.spec)
        rows = _rows(consumer.unique)
        if len(set(rows)) != len(rows):
            self._fail("a unique row is listed twice")
        if set(rows) != set(occurrences):
            self._fail("the unique rows are not the rows of the batch")
        inverse = consumer.inverse.tolist()
        if len(inverse) != len(occurrences) or any(
            not 0 <= u < len(rows) or rows[u] != row for u, row in zip(inverse, occurrences, strict=True)
        ):
            self._fail("inverse does not lead every occurrence to its row")
        offsets, order = consumer.offsets.tolist(), consumer.order.tolist()
        wanted: list[list[int]] = [[] for _ in rows]
        for position, u in enumerate(inverse):
            wanted[u].append(position)
        if len(offsets) != len(rows) + 1 or offsets[0] != 0 or offsets[-1] != len(order):
            self._fail("CSR offsets do not span the occurrences")
        if any(order[offsets[u] : offsets[u + 1]] != positions for u, positions in enumerate(wanted)):
            self._fail("CSR order is not the transpose of inverse, ascending inside each row")
        return rows

    def _check_sync(self, rows: list[Row]) -> None:
        if self._sync_now is None:
            return
        needed = self._previous_rows & set(rows)
        if not needed <= self._sync_now:
            self._fail(f"row {min(needed - self._sync_now)} of the batch before is needed now but not marked sync now")
        if self.spec.lookahead > 1 and self.spec.num_slots and self._sync_now - needed:
            self._fail(f"row {min(self._sync_now - needed)} of the batch before is marked sync now but not needed")

    def _check_evict(self, owner: OwnerPlan, rows: list[Row]) -> None:
        used, fetched = set(rows), set(_rows(owner.fetch))
        evicted = _rows(owner.evict)
        if len(evicted) != len(owner.evict_slots):
            self._fail("evicted rows and slots differ in number")
        for row, slot in zip(evicted, owner.evict_slots.tolist(), strict=True):
            if self._slot_of_row.get(row) != slot:
                self._fail(f"evicts {row} from slot {slot}, it is in {self._slot_of_row.get(row)}")
            if self._last_use[row] > owner.evict_after:
                self._fail(f"evicts {row} after batch {owner.evict_after}, it is used by {self._last_use[row]}")
            if row in used and row not in fetched:
                self._fail(f"evicts {row}, which this batch uses")
            del self._slot_of_row[row], self._row_in_slot[slot]
            self._last_eviction[row] = self._batch_index
        if owner.evict_after >= self._batch_index:
            self._fail(f"evict_after {owner.evict_after} waits for the batch itself")

    def _check_fetch(self, owner: OwnerPlan, rows: list[Row]) -> None:
        fetched = _rows(owner.fetch)
        if not len(fetched) == len(owner.fetch_slots) == len(owner.fetch_new):
            self._fail("fetched rows, slots and new marks differ in number")
        if not set(fetched) <= set(rows):
            self._fail("fetches a row that the batch does not use")
        for row, slot, is_new in zip(fetched, owner.fetch_slots.tolist(), owner.fetch_new.tolist(), strict=True):
            if row in self._slot_of_row:
                self._fail(f"fetches {row}, which is resident")
            if slot in self._row_in_slot:
                self._fail(f"puts {row} in slot {slot}, which holds {self._row_in_slot[slot]}")
            if not 0 <= slot < (self.spec.num_slots or owner.num_slots):
                self._fail(f"puts {row} in slot {slot}, there are {self.spec.num_slots or owner.num_slots}")
            if is_new and row in self._last_use:
                self._fail(f"calls {row} new, batch {self._last_use[row]} used it")
            if self._last_eviction.get(row, NO_BATCH) > owner.fetch_after:
                self._fail(f"fetches {row} after batch {owner.fetch_after}, evicted at {self._last_eviction[row]}")
            self._slot_of_row[row] = slot
            self._row_in_slot[slot] = row
        if owner.fetch_after > self._batch_index:
            self._fail(f"fetch_after {owner.fetch_after} waits for a later batch")
        if self.spec.num_slots and len(self._slot_of_row) > self.spec.num_slots:
            self._fail(f"{len(self._slot_of_row)} rows are resident, capacity is {self.spec.num_slots}")
        if any(slot >= owner.num_slots for slot in self._row_in_slot):
            self._fail(f"a slot beyond the {owner.num_slots} slots said to be in use is used")

    def _check_resident(self, consumer: ConsumerPlan, rows: list[Row]) -> None:
        if not len(rows) == len(consumer.slots) == len(consumer.owners) == len(consumer.sync_now):
            self._fail("rows, slots, owners and sync marks differ in number")
        for row, slot in zip(rows, consumer.slots.tolist(), strict=True):
            if self._slot_of_row.get(row) != slot:
                self._fail(f"reads {row} from slot {slot}, it is in {self._slot_of_row.get(row)}")
        if any(owner != 0 for owner in consumer.owners.tolist()):
            self._fail("a row is owned by a rank that does not exist")

    def _fail(self, what: str) -> NoReturn:
        raise PlanError(f"batch {self._batch_index}: {what}")


def verify(planned: Iterable[tuple[Batch, CachePlan]], spec: OracleSpec) -> int:
    """Verify a whole run; the number of batches.

    Raises:
        PlanError: some plan breaks an invariant.
    """
    verifier = Verifier(spec)
    count = 0
    for batch, plan in planned:
        verifier.check(batch, plan)
        count += 1
    verifier.finish()
    return count


def _rows(rows: RowList) -> list[Row]:
    offsets = rows.table_offsets.tolist()
    ids = rows.ids.tolist()
    return [(table, row_id) for table in range(len(offsets) - 1) for row_id in ids[offsets[table] : offsets[table + 1]]]


def _occurrences(batch: Batch, spec: OracleSpec) -> list[Row]:
    offsets = batch.feature_offsets().tolist()
    values = batch.values.tolist()
    return [
        (ref.table, row_id)
        for ref in spec.features
        for row_id in values[offsets[ref.feature] : offsets[ref.feature + 1]]
    ]
