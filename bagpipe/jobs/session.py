"""`JobSession`: the runs of an open job on one rank, one after another, and how they end.

    begin ──> SteppedRun: step, step, … ──end──> the next run        end_here: before the end of the data
    flush, checkpoint: between two steps of a run, or two runs
    an error: other ranks are told first, then everything is released, and the session has failed

Two programs train by it: `python -m trainer`, whose cacher plans the batches, and `bagpipe.TrainPipeline`, whose user
brings them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from bagpipe.errors import JobError, PeerError, StoreError
from bagpipe.jobs.open_job import OpenJob
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.training.progress import RunResult
from bagpipe.training.stepped_run import SteppedRun

__all__ = ["JobSession"]


class JobSession:
    """The runs of one job on this rank. One thread calls it. A context manager, which releases the parts.

    Args:
        job: the open parts.
        stack: releases them; left to the session.
        rescues_rows: with one rank, write the rows of trained batches after an error that is not the store's. A job
            that is started again resumes from a checkpoint without.

    Attributes:
        job: the open parts.
        run: the one under way; None between two runs.
        carried: counters with which the next run begins: those of the checkpoint, or of the run before.
        failure: the error that has ended the session; None so far.
    """

    def __init__(self, job: OpenJob, stack: ExitStack, *, rescues_rows: bool = False) -> None:
        self.job = job
        self.run: SteppedRun | None = None
        self.carried: Mapping[str, Any] = job.checkpoints.carried()
        self.failure: BaseException | None = None
        self._stack = stack
        self._run_stack = stack.enter_context(ExitStack())
        self._rescues_rows = rescues_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release everything. A run under way is given up; its updated rows are written before (`write_rows`)."""
        self.run = None
        self._stack.__exit__(kind, error, trace)

    def begin(
        self, batches: Generator[RankBatch, None, None], first_batch: int, *, stops_on_signals: bool = False
    ) -> SteppedRun:
        """Begin a run. Its steps are made inside `failing`.

        Args:
            batches: planned batches; closed with the run.
            first_batch: number of the first of them.
            stops_on_signals: see `Engine.train_in_steps`.
        """
        with self.failing():
            self._run_stack.enter_context(closing(batches))
            run = self.job.engine.train_in_steps(
                batches, first_batch=first_batch, carried=self.carried, stops_on_signals=stops_on_signals
            )
            self.run = self._run_stack.enter_context(run)
        return self.run

    def end(self) -> RunResult:
        """End the run after its last batch; all updated rows are in the store."""
        run = self._under_way()
        with self.failing():
            result = run.end()
            self.leave()
        return result

    def end_here(self) -> RunResult:
        """End the run after the batches computed so far, whatever is read ahead. All ranks call it alike."""
        run = self._under_way()
        with self.failing():
            result = run.end_here()
            self.leave()
        return result

    def leave(self) -> None:
        """Give up the run between two steps, or note that it has ended."""
        run, job = self._under_way(), self.job
        loss_sums = {name: float(value) for name, value in job.engine.dense.loss_sums().items()}
        self.carried = {**run.carried(), "loss_sum": sum(loss_sums.values()), "loss_sums": loss_sums}
        self.run = None
        job.checkpoints.recorder.rest()
        self._run_stack.close()
        if job.replicas is not None:
            job.replicas.share_buffers()

    def write_rows(self, *, makes_checkpoint: bool = False) -> None:
        """Write all updated rows of this rank, when all ranks have met; or make a checkpoint, which does."""
        if self.run is not None:
            if self.job.ranks.peers is not None:
                self.run.settle()
            (self.run.checkpoint if makes_checkpoint else self.run.flush)()

    def flush(self, call: str, step: int, *, claims: bool = False) -> None:
        """Write all updated rows of all ranks: no lane acts until the next step. Collective.

        Args:
            call: what the ranks do; all must do the same.
            step: batches trained.
            claims: claim the namespace, if that is not done.

        Raises:
            InputError: ranks make different calls, or before different batches.
            StoreError, PeerError: the session has failed.
        """
        with self.failing():
            self.job.meet(call, step)
            if claims:
                self.job.claim()
            self.write_rows()
            self.job.meet(f"{call}: rows are written", step)

    def checkpoint(self, step: int, *, again: bool = False) -> None:
        """Make a checkpoint of the batches trained so far. Collective.

        Args:
            step: batches trained.
            again: in place of one that the end of a run or an earlier call has made of them.
        """
        with self.failing():
            self.job.meet("save", step)
            self._checkpoint(step, again=again)

    def renew_checkpoint(self, call: str, step: int) -> None:
        """Make the checkpoint of the latest batch again, if a part has other counters since, on any rank. Collective.

        Args:
            call: that the ranks make.
            step: batches trained.
        """
        with self.failing():
            self.job.meet(call, step)
            if any(self.job.ranks.gather(self.job.checkpoints.recorder.has_changed(step))):
                self._checkpoint(step, again=True)

    def _checkpoint(self, step: int, *, again: bool) -> None:
        if self.run is not None:
            self.run.checkpoint(again=again)
        else:
            self.job.checkpoints.recorder.checkpoint(step, again=again)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error that leaves the block ends the session."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Release everything after an error.

        Raises:
            The error, or the one that caused it: of a rank that failed first, or because another job took over.
        """
        self.failure = error
        self.job.tell(error)
        run, self.run = self.run, None
        rescues = self._rescues_rows and self.job.ranks.peers is None
        with self._stack:
            if run is not None and rescues and not isinstance(error, (StoreError, PeerError)):
                run.give_up()
                with suppress(StoreError, JobError):
                    run.rescue()
            raise error

    def _under_way(self) -> SteppedRun:
        assert self.run is not None, "a run has begun"
        return self.run
