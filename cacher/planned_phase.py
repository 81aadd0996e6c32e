"""`PlannedPhase`: the planned batches of one phase, in the calling thread.

    loader ──Batch──> planner's window (lookahead) ──Decision──> CachePlan ──> PlannedBatch ──for_rank──> RankBatch
                      with shards: in a thread of its own │ the calling thread

Bad data ends the stream after all batches before it, whatever the lookahead. A batch that cannot fit the cache ends it
immediately, because the job cannot run as configured. The window of a stream is planned with the batches there are, if
none comes for a while.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from bagpipe.errors import CapacityError, InputError
from bagpipe.oracle.assembly import Decision
from bagpipe.oracle.capacity import capacity_error
from bagpipe.oracle.direct import DirectPlanner
from bagpipe.oracle.plan import CachePlan
from bagpipe.oracle.planner import Planner
from bagpipe.oracle.rank_batch import PlanSpan, RankBatch
from bagpipe.types.batch import Batch
from cacher.ahead import Ahead
from cacher.shard_link import Stopped
from cacher.sharded_phase import ShardedPhase
from data.loader import LookaheadLoader

__all__ = ["PlannedBatch", "PlannedPhase"]

#: Batches decided before the calling thread asks for them, where there are shards.
_DECIDED_AHEAD = 2
#: A decision is a matter of milliseconds; the wait for data or shards ends with `stop`.
_JOIN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """A global batch and its plan for all ranks.

    Attributes:
        ids_in_plan: the batch's ids are zeros; they are those of its plan.
    """

    batch: Batch
    plan: CachePlan
    span: PlanSpan
    ids_in_plan: bool = False

    def for_rank(self, rank: int, *, without_ids: bool = False) -> RankBatch:
        """One rank's part. Each call cuts it out anew. `without_ids`: see `RankBatch.of`."""
        return RankBatch.of(
            self.batch, self.plan, rank, self.span, ids_in_plan=self.ids_in_plan, without_ids=without_ids
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _WindowBatch:
    """A batch in the window.

    Attributes:
        read_start_ns: when its reading began.
        skipped_rows: malformed rows skipped up to its end.
    """

    batch: Batch
    read_start_ns: int
    skipped_rows: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decided:
    """A batch between its decision and its plan.

    Attributes:
        waiting: the batch.
        decision: for it.
        start_ns, end_ns: when it was decided.
    """

    waiting: _WindowBatch
    decision: Decision
    start_ns: int
    end_ns: int


class PlannedPhase:
    """The planned batches of one phase, in order. An iterator; `close` stops the loader.

    Args:
        loader: begins at or before `first_batch`; at batch 0 if `planner` learns.
        planner: from `make_planner`.
        num_features: of the data.
        max_steps, first_batch: see `PlannedData.phase`.
        patience_s: plan with a shorter window if no batch comes for so long; None: wait for a full one.
        shards: they index the planner's batches; None: there are none.

    Attributes:
        spec: of the plans.
        num_features: of the data.
        skipped_rows: malformed rows up to the last batch yielded; at the end of the data, all of them.
    """

    def __init__(
        self,
        loader: LookaheadLoader,
        planner: Planner | DirectPlanner,
        *,
        num_features: int,
        max_steps: int = 0,
        first_batch: int = 0,
        patience_s: float | None = None,
        shards: ShardedPhase | None = None,
    ) -> None:
        self.spec = planner.spec
        self.num_features = num_features
        self.skipped_rows = 0
        self._loader = loader
        self._first_batch = first_batch
        self._next_batch = self._next_decided = first_batch
        self._max_steps = max_steps
        self._planner = planner
        self._patience_s = patience_s
        self._shards = shards
        self._is_stopped = False
        self._data_end: int | None = None  # number of batches in the data
        self._window: deque[_WindowBatch] = deque()
        self._last_skipped_rows: int | None = None  # once nothing follows
        self._decided = self._decide_all()
        self._ahead: Ahead[_Decided] | None = None

    def __iter__(self) -> PlannedPhase:
        return self

    def __next__(self) -> PlannedBatch:
        if self._shards is not None and self._ahead is None and not self._is_stopped:
            self._ahead = Ahead(self._decided, depth=_DECIDED_AHEAD, name="cacher-decider")
            self._ahead.start()
        try:
            decided = next(self._ahead or self._decided)
        except Exception:  # the end, or that of good data
            if self._last_skipped_rows is not None:
                self.skipped_rows = self._last_skipped_rows
            raise
        return self._planned(decided)

    @property
    def end(self) -> int | None:
        """Number of the first batch after the phase, once all batches have been yielded; else None.

        Stays None if reading was stopped or failed: the end of the iterator alone is not the end of the data.
        """
        if self._is_stopped:
            return None
        has_ended = self._data_end is not None and self._next_batch >= self._data_end
        has_enough = bool(self._max_steps) and self._next_batch >= self._max_steps
        return self._next_batch if has_ended or has_enough else None

    def stop(self) -> None:
        """Yield nothing more and end as soon as possible. From any thread."""
        self._is_stopped = True
        if self._ahead is not None:
            self._ahead.stop()
        self._loader.wake()
        if self._shards is not None:
            self._shards.stop()

    def close(self) -> None:
        """Stop reading and planning. Idempotent."""
        if self._ahead is not None:
            self.stop()
        if self._ahead is None or self._ahead.join(_JOIN_TIMEOUT_S):
            self._decided.close()

    def _decide_all(self) -> Generator[_Decided, None, None]:
        if self._is_stopped:
            return
        with self._loader, self._shards or nullcontext():
            if self._has_enough():
                self._last_skipped_rows = self._skipped_before_first()
                return
            error = yield from self._fill()
            while self._window and not self._is_done():
                yield self._decide()
            if self._is_done():
                return
            # Includes those after the last good row.
            self._last_skipped_rows = self._loader.skipped_rows()
            if error is not None:
                raise error

    def _skipped_before_first(self) -> int:
        """Malformed rows before the first batch of a phase that was resumed after its last step."""
        while int(self._loader.state()["batch"]) < self._first_batch and not self._is_stopped:
            if next(self._loader, None) is None:
                break
        return self._loader.skipped_rows()

    def _fill(self) -> Generator[_Decided, None, InputError | None]:
        """Read and decide while the data lasts. Returns None, or the error of bad data."""
        number = int(self._loader.state()["batch"])  # of the batch that is read next
        while not self._is_done():
            read_start_ns = time.monotonic_ns()
            if self._patience_s is not None:
                yield from self._plan_while_waiting(self._patience_s)
                if self._is_done():
                    return None
            try:
                batch = next(self._loader, None)
                if batch is None:
                    self._data_end = number
                    return None
                number = batch.index + 1
                batch = self._completed(batch)
                if batch.index < self._first_batch:
                    if self._planner.learns:
                        self._planner.pass_over(batch)
                    continue
                if not self._push(batch):
                    return None
            except CapacityError:
                raise
            except InputError as error:
                return error
            except Stopped:
                return None
            skipped_rows = self._loader.skipped_rows()
            self._window.append(_WindowBatch(batch=batch, read_start_ns=read_start_ns, skipped_rows=skipped_rows))
            if self._planner.is_ready:
                yield self._decide()
        return None

    def _plan_while_waiting(self, patience_s: float) -> Generator[_Decided, None, None]:
        """Return when the next batch is there, or the phase is done. Plan those in the window if it takes long."""
        while not self._loader.wait(patience_s) and not self._is_done():
            while self._window and not self._is_done():
                yield self._decide(more_follow=True)

    def _completed(self, batch: Batch) -> Batch:
        return batch if self._shards is None else self._shards.complete(batch)

    def _push(self, batch: Batch) -> bool:
        """Add a batch to the planner's window. False if it is too large but not wanted."""
        try:
            self._planner.push(batch)
        except CapacityError:
            if self._max_steps and batch.index >= self._max_steps:
                return False
            raise self._capacity_error(batch) from None
        return True

    def _capacity_error(self, batch: Batch) -> CapacityError:
        """The error of a batch that does not fit."""
        assert isinstance(self._planner, Planner), "direct mode has no capacity"
        return capacity_error(self._planner, batch, self._wanted(), held_out=self._loader.phase == "eval")

    def _wanted(self) -> Iterator[Batch]:
        """The rest of the batches, up to the last that is wanted."""
        while not self._is_stopped and (self._patience_s is None or self._loader.wait(0)):
            batch = next(self._loader, None)
            if batch is None or (self._max_steps and batch.index >= self._max_steps):
                return
            yield self._completed(batch)

    def _is_done(self) -> bool:
        return self._is_stopped or self._has_enough()

    def _has_enough(self) -> bool:
        return bool(self._max_steps) and self._next_decided >= self._max_steps

    def _decide(self, *, more_follow: bool = False) -> _Decided:
        start_ns = time.monotonic_ns()
        decision = self._planner.decide(more_follow=more_follow)
        waiting = self._window.popleft()
        self._next_decided = waiting.batch.index + 1
        return _Decided(waiting=waiting, decision=decision, start_ns=start_ns, end_ns=time.monotonic_ns())

    def _planned(self, decided: _Decided) -> PlannedBatch:
        start_ns = time.monotonic_ns()
        waiting, plan = decided.waiting, decided.decision.plan()
        self._next_batch = plan.batch_index + 1
        self.skipped_rows = waiting.skipped_rows
        end_ns = decided.end_ns + time.monotonic_ns() - start_ns  # without the wait between the threads
        span = PlanSpan(read_start_ns=waiting.read_start_ns, plan_start_ns=decided.start_ns, plan_end_ns=end_ns)
        return PlannedBatch(
            batch=waiting.batch,
            plan=plan,
            span=span,
            ids_in_plan=self._shards is not None and self._shards.is_narrow,
        )
