"""`SteppedRun`: a run whose batches the caller computes, one at a time.

start ──> lanes read, fetch, insert, write …      until their bounds
step  ──> compute lane, one batch, in the calling thread: F, B, UPDATE, OPT
step_part ──> one micro-batch of it; with the last one, the rest of the batch
stop  ──> the steps that follow compute what is read, and no rank reads more
rest  ──> no lane acts until the next step        flush: and the store has all updated rows
                                                  checkpoint: and a restart begins here
end   ──> lanes have ended, dirty rows are written, the last checkpoint is made
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from bagpipe.errors import InputError, JobError
from bagpipe.pipeline.runner import Runner
from bagpipe.training.checkpointing import Checkpointing
from bagpipe.training.part import InFlightBatch, LoopRun
from bagpipe.training.progress import Progress, RunResult
from bagpipe.training.rows import EvaluationRows
from bagpipe.training.totals import Totals

__all__ = ["OnBatch", "StepPart", "SteppedRun"]

#: Called after every batch with a function that gives the totals so far.
OnBatch: TypeAlias = Callable[[Callable[[], Progress]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A micro-batch that is computed, or a batch that is not divided.

    Attributes:
        batch: what it is a part of.
        inputs: its own inputs of the dense part; None: this rank has none of its examples.
    """

    batch: InFlightBatch
    inputs: Any


class SteppedRun:
    """One run. `Engine.train_in_steps` makes it. One thread calls the methods.

    Args:
        run: the run as its parts see it.
        runner: walks its lanes.
        rows: reads rows, and writes them back in training.
        totals: counts what is done.
        end: ends the parts after the lanes, and gives the result.
        checkpointing: makes checkpoints; None: without a recorder.
        exchanges: training with several ranks: lanes wait for lanes of other ranks, which need not rest as well.
        begun_ahead: batches that are begun before the batch of a step ends.
    """

    def __init__(
        self,
        run: LoopRun,
        runner: Runner,
        rows: EvaluationRows,
        totals: Totals,
        end: Callable[[], RunResult],
        *,
        checkpointing: Checkpointing | None = None,
        exchanges: bool = False,
        begun_ahead: int = 0,
    ) -> None:
        self._run = run
        self._runner = runner
        self._rows = rows
        self._totals = totals
        self._end = end
        self._checkpointing = checkpointing
        self._exchanges = exchanges
        self._begun_ahead = begun_ahead
        self._next_batch = run.first_batch
        self._next_part = 0
        self._has_ended = False

    @property
    def next_batch(self) -> int:
        """Number of the batch that the next `step` computes."""
        return self._next_batch

    def peek(self) -> InFlightBatch | None:
        """The batch that the next `step` computes, once it is read. None: there is none.

        Raises:
            The first error of any lane.
        """
        return self._run.in_flight[self._next_batch] if self._runner.await_batch("0X_READ", self._next_batch) else None

    def await_batch(self, check: Callable[[], object]) -> None:
        """Wait until the batch of the next step is read, there is none, or the run has failed, which `step` raises.

        Args:
            check: called about twice a second. What it raises leaves the run as it is between two steps.
        """
        try:
            self._runner.await_batch("0X_READ", self._next_batch, check)
        except BaseException as error:
            if error is not self._runner.first_error():
                raise

    def progress(self) -> Progress:
        """The totals so far. Any thread may ask."""
        return self._totals.progress()

    def whole(self, on_batch: OnBatch | None = None) -> RunResult:
        """Compute all batches, and end the run. Raises: see `step` and `end`."""
        while self.step() is not None:
            if on_batch is not None:
                on_batch(self.progress)
        return self.end()

    def start(self) -> None:
        """Start the lanes but that of the compute."""
        self._runner.start()

    def step(self) -> InFlightBatch | None:
        """Compute the next batch. None: there is none; `end` follows.

        Raises:
            The first error of any lane. That of the model, its loss or its optimizer is raised as it is.
        """
        b = self._runner.step()
        if b is None:
            return None
        self._next_batch = b + 1
        return self._run.in_flight[b]

    def step_part(self) -> StepPart | None:
        """Compute the next micro-batch (`WholeDense`), or the next batch if it is not divided.

        After the last micro-batch come the batch's update and its step. None: there is none; `end` follows.

        Raises:
            As `step`.
        """
        b = self._runner.step(until="0B")
        if b is None:
            return None
        batch, part = self._run.in_flight[b], self._next_part
        num_parts = len(batch.context.parts)
        self._next_part = part + 1 if part + 1 < num_parts else 0
        if self._next_part == 0:
            self._runner.step()
            self._next_batch = b + 1
        return StepPart(batch=batch, inputs=batch.inputs[part] if num_parts and batch.inputs else batch.inputs)

    def check_between_batches(self) -> None:
        """Check that no batch has micro-batches whose update is still to come.

        Raises:
            InputError: some are computed.
        """
        if self._next_part:
            num_parts = len(self._run.in_flight[self._next_batch].context.parts)
            raise InputError(
                f"state is saved between two steps, but of the {num_parts} batches of step {self._next_batch}, "
                f"{self._next_part} are done: call progress until the step is done"
            )

    def rest(self) -> None:
        """Wait until no lane acts before the next `step`. Raises the first error of any lane.

        With several ranks, until no lane changes rows or writes them. A lane may wait in an exchange of a later batch
        for a rank that can take part only after the next step.
        """
        runner = self._runner
        if not self._exchanges:
            runner.rest()
            return
        runner.hold("copy")
        runner.await_done("0X_WRITEBACK", runner.num_done("0X_EVICT"))
        # The other ranks have computed the batch too, and their part of its exchange waits for no held lane.
        runner.await_done("0X_UPDATE_LATE", self._next_batch)

    def settle(self) -> None:
        """Wait until no lane of any rank acts before the next `step`; all ranks call it before the same batch.

        Then every message between ranks has arrived, so the run can be given up without a rank waiting for another.

        Raises:
            The first error of any lane.
        """
        self._runner.rest()

    def stop(self) -> None:
        """Read no further batch, on any rank. The steps that follow compute those that are read. Idempotent."""
        if not self._runner.stop_requested:
            self._runner.request_stop()

    def flush(self) -> None:
        """Rest, and write all updated rows; they stay in the cache.

        Raises:
            StoreError: the store failed.
        """
        self.rest()
        self._rows.flush()

    def checkpoint(self, *, again: bool = False) -> None:
        """Rest, write all updated rows, and make a checkpoint at `next_batch`; then training can go on.

        Returns on rank 0 when the checkpoint is published, on another rank when its part is durable. All ranks call it
        before the same batch; micro-batches whose step is not done are given up. One at the step where the run began,
        or of the latest call, exists and is not made anew, unless `again`.

        Raises:
            JobError: a checkpoint could not be written.
            StoreError: the store failed.
        """
        assert self._checkpointing is not None, "the engine has a recorder"
        self.rest()
        self._roll_back()
        in_flight = list(self._run.in_flight.values())
        assert all(batch.writes is None for batch in in_flight), "rows that left are written before lanes rest"
        self._rows.flush()
        self._checkpointing.checkpoint(again=again)

    def rescue(self) -> None:
        """Write all updated rows after an error of the model, its loss or its optimizer, when all lanes have ended."""
        self._rows.rescue()

    def carried(self) -> dict[str, Any]:
        """Counters with which a following run goes on; between two steps or at the end."""
        return dict(self._run.counters())

    def end(self) -> RunResult:
        """End the run after its last batch; see `Engine.train`."""
        self._has_ended = True
        self._runner.end()
        return self._end()

    def end_here(self) -> RunResult:
        """End the run after the batches computed so far; those read ahead are dropped. All ranks call it alike.

        Where a step begins the next batch too (`pipeline.rows_delay`), that one is computed first.

        Raises: see `Engine.train`.
        """
        self.settle()
        has_begun = self._next_batch > self._run.first_batch
        self._runner.cut(self._next_batch + (self._begun_ahead if has_begun else 0))
        while self.step() is not None:
            pass
        return replace(self.end(), input_error=None)  # an error of later batches is none of this run

    @property
    def is_stopping(self) -> bool:
        """A signal, this rank or another one has asked the run to stop."""
        return self._runner.stop_requested

    @property
    def can_end_here(self) -> bool:
        """`end_here` computes no further batch: a step does not begin the next one. Equal on all ranks."""
        return not self._begun_ahead

    def give_up(self) -> None:
        """End the lanes, unless `end` was called; micro-batches whose step is not done are given up. Idempotent."""
        self._roll_back()
        if not self._has_ended:
            self._has_ended = True
            self._runner.abort(JobError("the run was given up"))
            with suppress(BaseException):
                self._runner.end()

    def _roll_back(self) -> None:
        if self._next_part:
            self._next_part = 0
            for part in self._run.parts:
                part.roll_back()
