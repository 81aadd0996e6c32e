"""Independent verification of plans: replays them against their batches with dicts and sets.

Shares no code with the planner. Python loops over ids make it slow: it is for tests and debugging, not for hot paths.
Each rule is one method. The first violation raises `PlanError` with the batch, the rule and the row.

    check(batch, plan): arrays ─> examples ─> index of each consumer ─> evict ─> fetch ─> homes ─> exchange ─> versions
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.oracle.plan import NO_BATCH, CachePlan, ConsumerPlan, ExchangePlan, OracleSpec, OwnerPlan, RowList
from bagpipe.oracle.plan_arrays import violations
from bagpipe.oracle.versions import Seen, Versions
from bagpipe.types.batch import Batch

__all__ = ["PlanError", "Verified", "Verifier", "verify"]

Row = tuple[int, int]  # (table number, id)
Home = tuple[int, int]  # (rank, slot)


class PlanError(AssertionError):
    """A plan breaks an invariant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Counts of a verified run.

    Attributes:
        num_batches: plans checked.
        evictions_waiting: evicted rows, of all ranks, that the previous batch used: see `OwnerPlan.evict_waiting`.
    """

    num_batches: int
    evictions_waiting: int


class Verifier:
    """Takes every (batch, plan) of a run in order. `finish` checks the end of the run.

    Attributes:
        evictions_waiting: so far; see `Verified`.
    """

    def __init__(self, spec: OracleSpec) -> None:
        self.spec = spec
        self.evictions_waiting = 0
        self._shares = spec.example_shares or (1,) * spec.world_size
        # Without a cache, or with a window of one batch, every row counts as needed next: at all batches, and at the
        # previous one.
        self._is_blind = self._was_blind = spec.num_slots == 0 or spec.lookahead == 1
        # Batches whose windows were short, each with the last batch in it.
        self._short_windows: list[tuple[int, int]] = []
        self._batch_index = NO_BATCH
        self._home: dict[Row, Home] = {}
        self._row_at: dict[Home, Row] = {}
        self._versions = Versions(spec.rows_delay)
        self._last_use: dict[Row, int] = {}
        self._last_eviction: dict[Row, int] = {}
        self._num_slots_used = [0] * spec.world_size
        # Of the latest batches, oldest first: those whose updates a lookup leaves out are the last ones.
        self._latest_rows: deque[set[Row]] = deque([set()] * (1 + spec.rows_delay), maxlen=1 + spec.rows_delay)
        # Of the previous batch: which of its rows each record marks as needed by the next batch.
        self._previous_marks: list[dict[Row, bool]] = []

    def check(self, batch: Batch, plan: CachePlan, *, last_seen: int | None = None) -> None:
        """Replay one batch.

        Args:
            last_seen: the last batch in the window when this one was planned, if that was not full and others have
                followed; None: it was full, or the data has ended.

        Raises:
            PlanError: the plan breaks an invariant.
        """
        if not batch.index == plan.batch_index == self._batch_index + 1:
            self._fail(f"expected batch {self._batch_index + 1}, got batch {batch.index} with plan {plan.batch_index}")
        self._batch_index = batch.index
        for violation in violations(plan, self.spec):
            self._fail(violation)
        bags = _bags(batch)
        examples = self._check_examples(batch, plan)
        rows_of_ranks = [
            self._check_index(rank, consumer, _occurrences(bags, examples[rank], self.spec))
            for rank, consumer in enumerate(plan.consumers)
        ]
        rows = set(itertools.chain.from_iterable(rows_of_ranks))
        self._check_marks_before(rows)
        self._check_expired(batch, plan.owners)
        # A row can move between ranks within one batch, so all evictions come first.
        for rank, owner in enumerate(plan.owners):
            self._check_evict(rank, owner, rows, {row for other in plan.owners for row in _rows_of(other.fetch)})
        for rank, owner in enumerate(plan.owners):
            self._check_fetch(rank, owner, rows)
        for rank, consumer in enumerate(plan.consumers):
            self._check_homes(rank, consumer, rows_of_ranks[rank])
        for rank, exchange in enumerate(plan.exchanges):
            self._check_owned(rank, exchange, rows)
            self._check_served(rank, exchange, rows_of_ranks)
            self._check_pulls(rank, exchange, rows_of_ranks[rank])
            self._check_ready(rank, exchange, plan.owners)
        self._was_blind = self._is_blind or last_seen == batch.index
        if last_seen is not None:
            self._short_windows.append((batch.index, last_seen))
        self._check_marks_now(plan, rows_of_ranks)
        self._update(rows)

    def finish(self) -> None:
        """End of the run: no row is needed by a next batch."""
        if not self._was_blind and any(any(marks.values()) for marks in self._previous_marks):
            self._fail("rows are marked as needed by the next batch, but there is none")

    def _check_examples(self, batch: Batch, plan: CachePlan) -> list[list[int]]:
        """The examples of each rank: a partition, with the sizes of a split by shares or of what the ranks brought."""
        everything = list(range(batch.num_examples))
        if not plan.examples:
            return [everything]
        examples = [part.tolist() for part in plan.examples]
        if sorted(itertools.chain.from_iterable(examples)) != everything:
            self._fail("the ranks' examples are not a partition of the batch")
        for rank, part in enumerate(examples):
            if self.spec.assign == "own":
                start, stop = (sum(batch.rank_examples[:n]) for n in (rank, rank + 1))
                if part != everything[start:stop]:
                    self._fail(f"rank {rank} gets the examples {part}, it has brought {start} up to {stop}")
                continue
            start, stop = (sum(self._shares[:n]) * len(everything) // sum(self._shares) for n in (rank, rank + 1))
            if len(part) != stop - start or part != sorted(part):
                self._fail(f"rank {rank} gets {len(part)} examples, expected {stop - start}, ascending")
        return examples

    def _check_index(self, rank: int, consumer: ConsumerPlan, occurrences: Sequence[Row]) -> list[Row]:
        rows = _rows_of(consumer.unique)
        if len(set(rows)) != len(rows):
            self._fail(f"a unique row of rank {rank} is listed twice")
        if set(rows) != set(occurrences):
            self._fail(f"the unique rows of rank {rank} are not the rows of its examples")
        offsets, order = consumer.offsets.tolist(), consumer.order.tolist()
        if len(offsets) != len(rows) + 1 or offsets[0] != 0 or not offsets[-1] == len(order) == len(occurrences):
            self._fail(f"CSR offsets of rank {rank} do not span the occurrences")
        wanted: dict[Row, list[int]] = {row: [] for row in rows}
        for position, row in enumerate(occurrences):
            wanted[row].append(position)
        spans = zip(rows, itertools.pairwise(offsets), strict=True)
        if any(order[start:end] != wanted[row] for row, (start, end) in spans):
            self._fail(f"CSR order of rank {rank} does not lead every row to its occurrences, ascending")
        return rows

    def _check_marks_before(self, rows: set[Row]) -> None:
        """The rows that the previous batch marked as needed next are those this batch uses."""
        for marks in self._previous_marks:
            for row, is_marked in marks.items():
                if row in rows and not is_marked:
                    self._fail(f"row {row} of the previous batch is needed now but not marked sync now")
                if row not in rows and is_marked and not self._was_blind:
                    self._fail(f"row {row} of the previous batch is marked sync now but not needed")

    def _check_marks_now(self, plan: CachePlan, rows_of_ranks: Sequence[Sequence[Row]]) -> None:
        marks = [(rows, consumer.push_now) for rows, consumer in zip(rows_of_ranks, plan.consumers, strict=True)]
        marks += [(_rows_of(exchange.owned), exchange.owned_push_now) for exchange in plan.exchanges]
        self._previous_marks = [dict(zip(rows, flags.tolist(), strict=True)) for rows, flags in marks]
        if self._was_blind and not all(all(marks.values()) for marks in self._previous_marks):
            self._fail("a row is not marked sync now, but the next batch is unknown")

    def _check_evict(self, rank: int, owner: OwnerPlan, used: set[Row], fetched: set[Row]) -> None:
        evicted = _rows_of(owner.evict)
        for row, slot in zip(evicted, owner.evict_slots.tolist(), strict=True):
            if self._home.get(row) != (rank, slot):
                self._fail(f"rank {rank} evicts {row} from slot {slot}, it is in {self._home.get(row)}")
            if row in used and row not in fetched:
                self._fail(f"evicts {row}, which this batch uses")
            self._expect_fresh(
                self._versions.evict(row, self._batch_index, after=owner.evict_after),
                f"evicts {row} after batch {owner.evict_after}, it is used by {self._last_use[row]}",
            )
            del self._home[row], self._row_at[rank, slot]
            self._last_eviction[row] = self._batch_index
        num_waiting = sum(row in self._latest_rows[0] for row in evicted)
        if owner.evict_waiting != num_waiting:
            self._fail(
                f"says that {owner.evict_waiting} evicted rows wait, the previous batch used {num_waiting} of them"
            )
        self.evictions_waiting += num_waiting
        latest = self._batch_index - 1 - self.spec.rows_delay
        if owner.evict_after > max(latest, NO_BATCH):
            what = "the batch itself" if owner.evict_after >= self._batch_index else "an update after the lookup"
            self._fail(f"evict_after {owner.evict_after} waits for {what}")
        if self.spec.num_slots:
            if owner.expired is not None:
                if owner.evict_after != latest:
                    self._fail(f"evict_after is {owner.evict_after} where rows expire, expected {latest}")
            elif owner.evict_after != NO_BATCH and owner.evict_after > latest - (not num_waiting):
                self._fail(f"evict_after {owner.evict_after} waits for more than the evicted rows need")
            elif not evicted and owner.evict_after != NO_BATCH:
                self._fail(f"evict_after is {owner.evict_after}, but nothing is evicted")

    def _check_fetch(self, rank: int, owner: OwnerPlan, used: set[Row]) -> None:
        fetched = _rows_of(owner.fetch)
        num_slots = self.spec.slots_per_rank or owner.num_slots
        if not set(fetched) <= used:
            self._fail("fetches a row that the batch does not use")
        needed_wait = NO_BATCH
        # The latest batch whose window ended before this one: until then the row could leave unseen.
        short = (number for number, last_seen in self._short_windows if last_seen < self._batch_index)
        unseen = max([self._batch_index - self.spec.lookahead, *short])
        for row, slot, is_new in zip(fetched, owner.fetch_slots.tolist(), owner.fetch_new.tolist(), strict=True):
            if row in self._home:
                self._fail(f"fetches {row}, which is resident")
            if (rank, slot) in self._row_at:
                self._fail(f"puts {row} in slot {slot} of rank {rank}, which holds {self._row_at[rank, slot]}")
            if not 0 <= slot < num_slots:
                self._fail(f"puts {row} in slot {slot}, there are {num_slots}")
            if is_new and row in self._last_use:
                self._fail(f"calls {row} new, batch {self._last_use[row]} used it")
            self._expect_fresh(
                self._versions.fetch(row, after=owner.fetch_after, unread=is_new),
                f"fetches {row} after batch {owner.fetch_after}, evicted at {self._last_eviction.get(row)}",
            )
            if not is_new:
                needed_wait = max(needed_wait, self._last_eviction.get(row, NO_BATCH), unseen)
            self._home[row] = (rank, slot)
            self._row_at[rank, slot] = row
            self._num_slots_used[rank] = max(self._num_slots_used[rank], slot + 1)
        latest = needed_wait if self.spec.num_slots else self._batch_index
        if owner.fetch_after > latest:
            self._fail(f"fetch_after {owner.fetch_after} waits for more than the fetched rows need, {latest}")
        if owner.num_slots != self._num_slots_used[rank]:
            self._fail(f"rank {rank} says {owner.num_slots} slots are in use, it is {self._num_slots_used[rank]}")

    def _check_expired(self, batch: Batch, owners: Sequence[OwnerPlan]) -> None:
        """Every expired row leaves its cache and the store, by one rank; the rows that are born are fetched as new."""
        expired = [
            (rank, *entry)
            for rank, owner in enumerate(owners)
            if owner.expired is not None and owner.expired_slots is not None
            for entry in zip(_rows_of(owner.expired), owner.expired_slots.tolist(), strict=True)
        ]
        wanted = {
            (ref.table, row_id)
            for rows in batch.expired
            for ref in self.spec.features
            if ref.feature in rows.features
            for row_id in rows.ids.tolist()
        }
        if any((owner.expired is None) == bool(wanted) for owner in owners):
            self._fail("a rank does not know whether rows expire")
        if len(expired) != len(wanted) or {row for _, row, _ in expired} != wanted:
            self._fail("the ranks do not delete the rows that expire, each once")
        if expired != sorted(expired, key=lambda entry: (entry[0], entry[1][0], entry[1][1] % 2**64)):
            self._fail("the rows that expire are not in ascending order")
        for rank, row, slot in expired:
            home, last_use = self._home.pop(row, None), self._last_use.pop(row, NO_BATCH)
            if home != (None if slot < 0 else (rank, slot)):
                self._fail(f"rank {rank} deletes {row} in slot {slot}, it is in {home}")
            if home is not None:
                del self._row_at[home]
            if self._batch_index - last_use < LEAST_GAP and last_use != NO_BATCH:
                self._fail(f"deletes {row}, which batch {last_use} used")
            self._versions.delete(row)
            self._last_eviction.pop(row, None)
        if batch.is_born is not None:
            offsets = batch.feature_offsets().tolist()
            spans = [(ref.table, slice(offsets[ref.feature], offsets[ref.feature + 1])) for ref in self.spec.features]
            born = {
                (table, row_id) for table, span in spans for row_id in batch.values[span][batch.is_born[span]].tolist()
            }
            fetched = {
                row
                for owner in owners
                for row, is_new in zip(_rows_of(owner.fetch), owner.fetch_new.tolist(), strict=True)
                if is_new
            }
            if fetched != born:
                self._fail(f"fetches {fetched ^ born} as new though they are not, or the reverse")

    def _check_homes(self, rank: int, consumer: ConsumerPlan, rows: Sequence[Row]) -> None:
        homes = zip(consumer.owners.tolist(), consumer.slots.tolist(), strict=True)
        for row, home in zip(rows, homes, strict=True):
            if self._home.get(row) != home:
                self._fail(f"rank {rank} reads {row} from (rank, slot) {home}, it is in {self._home.get(row)}")

    def _check_owned(self, rank: int, exchange: ExchangePlan, used: set[Row]) -> None:
        owned = _rows_of(exchange.owned)
        if len(set(owned)) != len(owned) or set(owned) != {row for row in used if self._home[row][0] == rank}:
            self._fail(f"the owned rows of rank {rank} are not those of the batch's rows that live there")
        for row, slot in zip(owned, exchange.owned_slots.tolist(), strict=True):
            if self._home[row] != (rank, slot):
                self._fail(f"rank {rank} serves {row} from slot {slot}, it is in {self._home[row]}")

    def _check_served(self, rank: int, exchange: ExchangePlan, rows_of_ranks: Sequence[Sequence[Row]]) -> None:
        owned = _rows_of(exchange.owned)
        offsets, positions = exchange.serve_offsets.tolist(), exchange.serve_rows.tolist()
        if offsets[0] != 0 or offsets[-1] != len(positions) or offsets != sorted(offsets):
            self._fail(f"serve_offsets of rank {rank} do not span its serve_rows")
        for consumer, rows in enumerate(rows_of_ranks):
            served = positions[offsets[consumer] : offsets[consumer + 1]]
            wanted = [row for row in rows if self._home[row][0] == rank]
            if not all(0 <= n < len(owned) for n in served) or [owned[n] for n in served] != wanted:
                self._fail(f"rank {rank} does not serve rank {consumer} the rows it reads, in its order")
            if served != sorted(served):
                self._fail(f"serve_rows of rank {rank} for rank {consumer} are not ascending")

    def _check_pulls(self, rank: int, exchange: ExchangePlan, rows: Sequence[Row]) -> None:
        """A pull waits for the previous batch if and only if that batch changes the row in its slot."""
        changing = self._latest_rows[-1] if self.spec.num_slots else set()
        for row, now in zip(rows, exchange.pull_now.tolist(), strict=True):
            self._expect_fresh(
                self._versions.pull(row, self._batch_index, now=now), f"rank {rank} pulls {row} before its last update"
            )
            if now and row not in changing:
                self._fail(f"rank {rank} pulls {row} late, though the previous batch does not change it")
        for row, now in zip(_rows_of(exchange.owned), exchange.owned_pull_now.tolist(), strict=True):
            if now != (row in changing):
                self._fail(f"rank {rank} serves {row} {'late' if now else 'early'}, unlike its consumers' pulls")

    def _check_ready(self, rank: int, exchange: ExchangePlan, owners: Sequence[OwnerPlan]) -> None:
        """An exchange begins when no rank's evictions wait for a further update."""
        latest = max(owner.evict_after for owner in owners)
        if exchange.ready_after != latest:
            self._fail(f"rank {rank} exchanges after batch {exchange.ready_after}, the ranks evict after {latest}")

    def _update(self, rows: set[Row]) -> None:
        """Train the batch: each of its rows is updated once, now or late."""
        marks = {row: now for marks in self._previous_marks for row, now in marks.items()}
        for row in rows:
            self._versions.update(row, self._batch_index, push_now=marks[row])
            self._last_use[row] = self._batch_index
        self._latest_rows.append(rows)

    def _expect_fresh(self, seen: Seen, what: str) -> None:
        if seen.is_stale:
            self._fail(f"{what}: version {seen.found} instead of {seen.wanted}")

    def _fail(self, what: str) -> NoReturn:
        raise PlanError(f"batch {self._batch_index}: {what}")


def verify(planned: Iterable[tuple[Batch, CachePlan]], spec: OracleSpec) -> Verified:
    """Verify a whole run.

    Raises:
        PlanError: some plan breaks an invariant.
    """
    verifier = Verifier(spec)
    count = 0
    for batch, plan in planned:
        verifier.check(batch, plan)
        count += 1
    verifier.finish()
    return Verified(num_batches=count, evictions_waiting=verifier.evictions_waiting)


def _bags(batch: Batch) -> list[list[list[int]]]:
    """``bags[feature][example] = [ids]``."""
    ids = iter(batch.values.tolist())
    return [[list(itertools.islice(ids, length)) for length in lengths] for lengths in batch.lengths.tolist()]


def _occurrences(bags: Sequence[Sequence[Sequence[int]]], examples: Sequence[int], spec: OracleSpec) -> list[Row]:
    """The rows of some examples, in the order of occurrence numbers."""
    return [
        (ref.table, row_id) for ref in spec.features for example in examples for row_id in bags[ref.feature][example]
    ]


def _rows_of(rows: RowList) -> list[Row]:
    """The rows as (table, id) pairs."""
    offsets = rows.table_offsets.tolist()
    ids = rows.ids.tolist()
    return [(table, row_id) for table in range(len(offsets) - 1) for row_id in ids[offsets[table] : offsets[table + 1]]]
