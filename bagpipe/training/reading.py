"""`Reading`: takes the next batch and its plan, and makes index tensors and model inputs of them.

    batches ──next──> RankBatch ──prepare_batch, prepare──> InFlightBatch         lane data

With several ranks all of them vote before each batch: none reads a batch that another one does not read. Where batches
are waited for without a bound (a stream), the lane looks up now and then: a stop request ends the wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import WRITE_DEPTH
from bagpipe.cache.upload import Uploader
from bagpipe.distributed.interface import Peers, StepVote
from bagpipe.errors import InputError, JobError
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.report import Report
from bagpipe.pipeline.runner import EndOfBatches
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.builders.prefetch_loop import declare_reading
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.training.part import InFlightBatch, LoopPart, LoopRun
from bagpipe.types.batch import Batch

__all__ = ["PrepareInputs", "Reading"]

#: Longest wait for a batch before the lane looks whether it is to stop.
_LOOK_UP_S = 0.5

#: Makes the inputs of the dense part (`DenseExecutor.forward`) of a batch, and of what it uploads. None: it has none.
PrepareInputs: TypeAlias = Callable[[Batch, Uploader], Any]


class Reading(LoopPart):
    """Reads batches.

    Args:
        layout: how a batch is looked up.
        cache: the rows; its uploads carry the index tensors.
        prepare: makes a batch's model inputs of what it uploads.
        read_ahead: batches read and not yet trained, at most.
        peers: the other ranks; None: there are none.
        trace: records when the cacher planned each batch.
        await_batch: waits at most so many seconds until the next batch can be taken, or the end of the data; False: it
            cannot yet. None: batches come soon.

    Attributes:
        input_error: the data went bad after the batches read; it is raised when these are done.
    """

    def __init__(
        self,
        *,
        layout: LookupLayout,
        cache: RowCache,
        prepare: PrepareInputs,
        read_ahead: int,
        peers: Peers | None,
        trace: Trace | None,
        await_batch: Callable[[float], bool] | None = None,
    ) -> None:
        self.input_error: InputError | None = None
        self._layout = layout
        self._cache = cache
        self._prepare = prepare
        self._read_ahead = read_ahead
        self._peers = peers
        self._trace = trace
        self._await_batch = await_batch
        self._run: LoopRun
        self._next: RankBatch | None = None
        self._gave_up = False
        self._reader_state: Mapping[str, Any] | None = None

    def declare(self, loop: LoopBuilder) -> None:
        declare_reading(loop)

    def handlers(self) -> Mapping[str, Handler]:
        return {"X_READ": self.read}

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._next, self._gave_up, self.input_error = None, False, None
        self._reader_state = None
        # A batch is read when the one `read_ahead` before it is done: its area is free again.
        self._uploads = self._cache.uploads(self._read_ahead + 1)

    def read(self, b: int) -> None:
        if self._peers is None:
            while not self._take():
                if self._run.runner is not None and self._run.runner.stop_requested:
                    raise EndOfBatches
        found, self._next = self._next, None
        if found is None:
            raise EndOfBatches
        in_flight = self._run.in_flight
        # The data lane waited for the end of batch b - read_ahead on the device, so nothing there uses these any more.
        in_flight.pop(b - self._read_ahead - WRITE_DEPTH - 1, None)
        batch = found.batch
        with self._uploads.batch() as upload:
            context = prepare_batch(self._layout, batch, found.consumer, found.exchange, upload=upload)
            inputs = self._prepare(batch, upload)
        in_flight[b] = InFlightBatch(rank_batch=found, context=context, inputs=inputs)
        if self._trace is not None:
            self._trace.note("oracle", "0X_PLAN", b, found.span.plan_start_ns, found.span.plan_end_ns)

    def finish_batch(self, b: int) -> None:
        self._reader_state = self._run.in_flight[b].rank_batch.batch.reader_state

    def counters(self) -> Mapping[str, Any]:
        return {"reader_state": self._reader_state}

    def agree(self, stop: bool) -> bool:
        """With several ranks, before each batch: take it, and give it up if another rank has none or stops.

        Returns:
            Whether all ranks stop.
        """
        assert self._peers is not None, "only ranks with peers vote"
        while (strongest := self._peers.agree(self._vote(stop))) is StepVote.WAIT:
            stop = self._run.runner is not None and self._run.runner.stop_requested
        if strongest is not StepVote.GO:
            self._gave_up = self._next is not None
            self._next = None
        return strongest is StepVote.STOP

    def _vote(self, stop: bool) -> StepVote:
        """This rank's vote, after it has taken the next batch, unless that takes long."""
        has_taken = self._next is not None or self._take()
        if stop:
            return StepVote.STOP
        return StepVote.GO if self._next is not None else StepVote.END if has_taken else StepVote.WAIT

    def agree_on_end(self, report: Report, num_batches: int) -> Report:
        """Every rank has written its rows: what one rank knows of the end of the data, all ranks know.

        Raises:
            JobError: the data ended for some ranks only.
        """
        if self._peers is None:
            return report
        error = str(self.input_error) if self.input_error is not None else None
        ends = self._peers.gather([report.stopped, error, self._gave_up])
        for rank, (_, found, _) in enumerate(ends):
            if found is not None and self.input_error is None:
                self.input_error = InputError(f"rank {rank}: {found}")
        stopped = any(stopped for stopped, _, _ in ends)
        having_more = [rank for rank, (_, _, gave_up) in enumerate(ends) if gave_up]
        if having_more and not stopped and self.input_error is None:
            raise JobError(f"the data ended at batch {num_batches}, but ranks {having_more} have more")
        return dataclasses.replace(report, stopped=stopped)

    def _take(self) -> bool:
        """Take the next batch, if there is one. False: it has not come."""
        if self._await_batch is not None and not self._await_batch(_LOOK_UP_S):
            return False
        try:
            self._next = next(self._run.batches, None)
        except InputError as error:
            # Not raised here: the batches before are good, so they are trained and written back first.
            self.input_error = error
            self._next = None
        return True
