"""The embedding rows of a loop: `Rows` for training, `EvaluationRows`, and `LocalRows` where one rank has all rows.

X_FETCH   read the batch's missing rows from the store              lane net-in
X_EVICT   copy the leaving rows out of their slots                  lane copy
X_INSERT  put the fetched rows into their slots                     lane copy
X_NORM    squared norm of the rows' gradients, if it is limited     lane compute
X_UPDATE  one row-optimizer step per row of the batch               lane compute
X_WRITEBACK  write the rows that left, delete those that expired    lane net-out
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.gradient_squares import limbs_of_gradients
from bagpipe.cache.lookup import ActiveTableGroup, gradients_of
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import WRITE_DEPTH, FetchRequests
from bagpipe.errors import JobError, LostRowError
from bagpipe.kernels.exact_sum import total
from bagpipe.kernels.interface import RowSteps
from bagpipe.oracle.plan import NO_BATCH, OwnerPlan
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.stream import keep_for_current_stream
from bagpipe.schedule.builders.prefetch_loop import (
    EVICT_AFTER,
    FETCH_AFTER,
    WRITE_AFTER,
    declare_evaluation_rows,
    declare_rows,
    declare_update,
)
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.store.interface import DeleteRequest, Store, WriteRequest
from bagpipe.training.absent_rows import with_absent
from bagpipe.training.current_rows import RowReader
from bagpipe.training.part import Hook, InFlightBatch, LoopPart, LoopRun
from bagpipe.util.failpoints import hit

__all__ = ["EvaluationRows", "KnownRows", "LocalRows", "RowStepsOfBatch", "Rows"]

#: (batch, table number, ids int64 ``[n]`` that it fetches) -> bool ``[n]``: the store must have the row.
KnownRows: TypeAlias = Callable[[InFlightBatch, int, NDArray[np.int64]], NDArray[np.bool_]]

#: Batch number, from 0 -> settings of its row updates. Called once per batch, when its forward begins.
RowStepsOfBatch: TypeAlias = Callable[[int], RowSteps]


class EvaluationRows(LoopPart):
    """Rows from the store to their slots. They stay clean, so rows that leave are forgotten.

    Args:
        cache: the slots.
        store: open; evaluation only reads.
        prefetch_depth: batches fetched and not yet inserted, at most.
        known: which rows the store must have; a row is known if any of these knows it.

    Attributes:
        rows_fetched, rows_written: in this run.
        rows_deleted: rows that expired, of this rank's plans in this run; 0 in evaluation.
        evictions_waiting: rows of `OwnerPlan.evict_waiting` in this run; 0 in evaluation.
    """

    row_waits = ("0X_INSERT",)

    def __init__(self, *, cache: RowCache, store: RowReader, prefetch_depth: int, known: Sequence[KnownRows]) -> None:
        self.rows_fetched = self.rows_written = self.rows_deleted = self.evictions_waiting = 0
        self._cache = cache
        self._store = store
        self._prefetch_depth = prefetch_depth
        self._known = tuple(known)
        self._skips_new = False
        self._run: LoopRun

    def declare(self, loop: LoopBuilder) -> None:
        declare_evaluation_rows(loop, prefetch_depth=self._prefetch_depth)

    def handlers(self) -> Mapping[str, Handler]:
        return {"X_FETCH": self.fetch_to_score, "X_INSERT": self.replace}

    def hazards(self) -> Mapping[str, Callable[[int], int]]:
        return {EVICT_AFTER: lambda b: self._run.in_flight[b].rank_batch.owner.evict_after}

    def start(self, run: LoopRun) -> None:
        self._run = run
        self.rows_fetched = self.rows_written = self.rows_deleted = self.evictions_waiting = 0
        self._skips_new = False

    def fetch(self, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.requests = requests = FetchRequests.of(batch.rank_batch.owner, skip_new=self._skips_new)
        batch.results = self._store.read_many(requests.reads)
        hit("after-fetch")
        self._check_found(batch, requests.reads)
        batch.rows_found = sum(int(np.count_nonzero(result.found)) for result in batch.results)
        self.rows_fetched += requests.num_rows

    def fetch_to_score(self, b: int) -> None:
        """Fetch rows; those that the store does not have become what absent rows read."""
        self.fetch(b)
        batch = self._run.in_flight[b]
        assert batch.requests is not None, "just fetched"
        tables = self._cache.schema.tables
        batch.results = [
            with_absent(tables[table], table, result, self._store)
            for (table, _), result in zip(batch.requests.reads, batch.results, strict=True)
        ]

    def insert(self, b: int) -> None:
        batch = self._run.in_flight[b]
        assert batch.requests is not None, "fetched before"
        self._cache.insert(batch.rank_batch.owner, batch.requests, batch.results)
        self._cache.check(batch.context)
        batch.requests, batch.results = None, []

    def replace(self, b: int) -> None:
        self._cache.evict(self._run.in_flight[b].rank_batch.owner)
        self.insert(b)

    def flush(self) -> None:
        """Write updated rows: there are none."""

    def rescue(self) -> None:
        """Write updated rows after an error: there are none."""

    def _check_found(self, batch: InFlightBatch, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
        """Raise LostRowError if a row that was written before is not in the store: names the first one."""
        for (table, ids), result in zip(requests, batch.results, strict=True):
            if result.found.all():
                continue
            missing = ids[~result.found]
            is_lost = np.zeros(len(missing), dtype=np.bool_)
            # The writers are asked, not the plan: a row that was planned but never updated was not written.
            for known in self._known:
                is_lost |= known(batch, table, missing)
            if is_lost.any():
                name = self._cache.schema.tables[table].name
                raise LostRowError(
                    f"table {name} id {int(missing[np.argmax(is_lost)])} was written, but is not in the store any more "
                    f"({int(np.count_nonzero(is_lost))} such rows in one batch)"
                )


class Rows(EvaluationRows):
    """Rows from the store to their slots and back.

    Args:
        cache, store, prefetch_depth, known: as in `EvaluationRows`.
        claim: makes the namespace this job's, once every rank has its first batch; True if it held no rows before.
            Called in the data lane.
        expires: rows expire: plans know which rows are new, and delete others.
    """

    def __init__(
        self,
        *,
        cache: RowCache,
        store: Store,
        prefetch_depth: int,
        known: Sequence[KnownRows],
        claim: Callable[[], bool],
        expires: bool = False,
    ) -> None:
        super().__init__(cache=cache, store=store, prefetch_depth=prefetch_depth, known=known)
        self._claim = claim
        self._expires = expires
        self._latest_expiry = NO_BATCH
        self._writer = store

    def declare(self, loop: LoopBuilder) -> None:
        declare_rows(loop, prefetch_depth=self._prefetch_depth, write_depth=WRITE_DEPTH, expires=self._expires)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "X_FETCH": self.fetch,
            "X_EVICT": self.evict,
            "X_INSERT": self.insert,
            "X_WRITEBACK": self.write_back,
        }

    def hazards(self) -> Mapping[str, Callable[[int], int]]:
        fetch_after = {FETCH_AFTER: lambda b: self._run.in_flight[b].rank_batch.owner.fetch_after}
        write_after = {WRITE_AFTER: self._write_after} if self._expires else {}
        return {**super().hazards(), **fetch_after, **write_after}

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self._latest_expiry = NO_BATCH
        self._skips_new = self._expires

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.READ, when="after", call=self._claim_first)

    def evict(self, b: int) -> None:
        batch = self._run.in_flight[b]
        owner = batch.rank_batch.owner
        batch.writes, batch.epoch = self._cache.evict_in_epoch(owner)
        self.evictions_waiting += owner.evict_waiting

    def write_back(self, b: int) -> None:
        batch = self._run.in_flight[b]
        # On a device the lane has waited for the eviction by now, so the rows are here.
        self._write(self._arrived(batch), batch.epoch, b)
        batch.writes = None
        self._delete(batch, b)

    def _write_after(self, b: int) -> int:
        """Deletions come after all earlier writes of any rank, and before all later ones. Called in batch order."""
        if self._run.in_flight[b].rank_batch.owner.expired is None:
            return self._latest_expiry
        self._latest_expiry = b
        return b - 1

    def _delete(self, batch: InFlightBatch, b: int) -> None:
        """Delete the rows of this rank's plan that expired before the batch."""
        requests = deletions(batch.rank_batch.owner)
        if not requests:
            return
        for part in self._run.parts:
            part.before_write(batch.epoch)
        self._writer.delete_many(requests)
        for part in self._run.parts:
            part.after_delete(requests, batch.epoch, b)
        self.rows_deleted += sum(len(request.ids) for request in requests)

    def end(self) -> None:
        """Write back what is still dirty."""
        self.flush()

    def flush(self) -> None:
        """Write all updated rows. Requires idle lanes; rows stay in the cache.

        Raises:
            StoreError: the store failed. Rows not acknowledged are still dirty.
        """
        run = self._run
        for part in run.parts:
            part.before_flush()
        num_batches = run.first_batch + (0 if run.runner is None else run.runner.snapshot().batches)
        for requests in self._cache.flush():
            self._write(requests, self._cache.snapshot.epoch, num_batches)

    def rescue(self) -> None:
        """Write all updated rows after an error that has ended the lanes: those on their way first, in order."""
        for b, batch in sorted(self._run.in_flight.items()):
            if batch.writes is not None:
                self._write(self._arrived(batch), batch.epoch, b)
                batch.writes = None
                self._delete(batch, b)
        self.flush()

    def _arrived(self, batch: InFlightBatch) -> Sequence[WriteRequest]:
        """The rows that left for a batch. Raises JobError: one is not finite, or before that a gradient was not."""
        assert batch.writes is not None, "evicted before"
        try:
            return batch.writes()
        except JobError:
            for part in self._run.parts:
                part.before_write(batch.epoch)
            raise

    def _write(self, requests: Sequence[WriteRequest], epoch: int, b: int) -> None:
        for part in self._run.parts:
            part.before_write(epoch)
        self._writer.write_many(requests)
        for part in self._run.parts:
            part.after_write(requests, epoch, b)
        self.rows_written += sum(len(request.ids) for request in requests)

    def _claim_first(self, key: OpKey, b: int) -> None:
        if b == self._run.first_batch:
            # Only now: bad input must leave the store untouched. A namespace made by this job holds no rows yet.
            # Direct mode reads every row, new or not.
            is_new = self._claim()
            self._skips_new = self._expires or (is_new and self._cache.is_fixed)


class LocalRows(LoopPart):
    """Lookups and row updates of a rank whose cache holds all rows.

    Args:
        cache: the rows.
        row_steps: settings of a batch's updates; None: evaluation, nothing is updated.
        after_steps, skips, clips, rows_delay: see `declare_update`.
    """

    def __init__(
        self,
        cache: RowCache,
        row_steps: RowStepsOfBatch | None = None,
        *,
        after_steps: bool = False,
        skips: bool = False,
        clips: bool = False,
        rows_delay: int = 0,
    ) -> None:
        self._rows_delay = rows_delay
        self._skips = skips
        self._cache = cache
        self._clips = clips
        self._after_steps = after_steps
        self._row_steps = row_steps
        self._run: LoopRun

    def declare(self, loop: LoopBuilder) -> None:
        if self._row_steps is not None:
            declare_update(
                loop,
                after_steps=self._after_steps,
                skips=self._skips,
                clips=self._clips,
                rows_delay=self._rows_delay,
            )

    def handlers(self) -> Mapping[str, Handler]:
        measure = {"X_NORM": self.measure} if self._clips else {}
        return {} if self._row_steps is None else {**measure, "X_UPDATE": self.update}

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.LOOKUP, when="before", call=self._begin)

    def start(self, run: LoopRun) -> None:
        self._run = run

    def measure(self, b: int) -> None:
        batch = self._run.in_flight[b]
        gradients = [gradients_of(group, 0) for group in batch.groups if group.gradients]
        batch.row_squares = total(limbs_of_gradients(self._cache.kernels, gradients, self._cache.device))

    def update(self, b: int) -> None:
        batch = self._run.in_flight[b]
        if batch.is_skipped:
            drop_gradients(self._cache.end(batch.context))
        else:
            if batch.row_factor is not None:
                keep_for_current_stream(batch.row_factor)  # of the lane of a stage's step
                scale_gradients(batch.groups, batch.row_factor)
            self._cache.update(batch.context, batch.row_steps)
        batch.groups = ()  # they hold the gradients, and records that the cache may have outgrown

    def _begin(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        if self._row_steps is None:
            self._cache.begin(batch.context)
        else:
            batch.groups = self._cache.begin(batch.context, step=b)
            batch.row_steps = self._row_steps(b)


def deletions(owner: OwnerPlan) -> list[DeleteRequest]:
    """The rows that a plan deletes, by table."""
    if owner.expired is None:
        return []
    spans = enumerate(pairwise(owner.expired.table_offsets.tolist()))
    return [DeleteRequest(table, owner.expired.ids[first:end]) for table, (first, end) in spans if first < end]


def scale_gradients(groups: Sequence[ActiveTableGroup], factor: Tensor) -> None:
    """Multiply the gradients of a batch's rows by a scalar."""
    for group in groups:
        # Not in place: two groups may hold the same tensor.
        group.gradients[:] = [gradient._replace(vectors=gradient.vectors * factor) for gradient in group.gradients]


def drop_gradients(groups: Sequence[ActiveTableGroup]) -> None:
    """Forget the gradients of a batch that is skipped."""
    for group in groups:
        group.gradients.clear()
