"""`Engine`: trains and evaluates one model on planned batches. A run is a sum of parts, composed here.

train     Reading + Rows + (LocalRows | ExchangedRows) + DensePart + NonfiniteGuard + Checkpointing + … + Totals
evaluate  Reading + EvaluationRows + (LocalRows | EvaluationExchange) + Scoring + LookupGuard + Totals

parts ──declare──> one checked Loop ──Runner──> one thread per lane
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.dense.loss import BCE, Loss
from bagpipe.distributed.interface import Peers
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.pipeline.runner import Runner
from bagpipe.pipeline.signals import StopOnSignals
from bagpipe.pipeline.trace import Trace
from bagpipe.schedule.ir.loop_builder import LoopBuilder
from bagpipe.store.interface import Store
from bagpipe.training.checkpointing import Checkpointing
from bagpipe.training.current_rows import RowReader
from bagpipe.training.dense import DensePart
from bagpipe.training.evaluation import OnScores, Scoring
from bagpipe.training.lookup_guard import LookupGuard
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.part import EarlierSteps, LoopPart, LoopRun, handlers_of
from bagpipe.training.progress import RunResult
from bagpipe.training.reading import PrepareInputs, Reading
from bagpipe.training.row_decay import with_decay
from bagpipe.training.row_exchange import EvaluationExchange, ExchangedRows
from bagpipe.training.row_steps import going_on
from bagpipe.training.rows import EvaluationRows, KnownRows, LocalRows, Rows, RowStepsOfBatch
from bagpipe.training.stepped_evaluation import Outputs
from bagpipe.training.stepped_run import OnBatch, SteppedRun
from bagpipe.training.totals import Totals

__all__ = ["Engine", "EngineSettings", "IsWritten", "OnBatch"]

#: How long lanes can stay inside a handler after an error: the store's default deadline of 30 s, and as much again.
_GRACE_S = 60.0

#: (table number, ids int64 ``[n]``) -> bool ``[n]``: the row was written before, so the store must have it.
IsWritten: TypeAlias = Callable[[int, NDArray[np.int64]], NDArray[np.bool_]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Numbers the engine needs.

    Attributes:
        prefetch_depth: batches fetched ahead.
        read_ahead: batches read and not yet trained, at most.
        rows_delay: updates that the lookup of a batch leaves out besides those of later batches, as planned.
        expires: rows expire, as the plans say.
        rows_lr, eps: of the row optimizer of all tables; None: the engine has `row_steps`.
    """

    prefetch_depth: int
    read_ahead: int
    rows_delay: int = 0
    expires: bool = False
    rows_lr: float | None = None
    eps: float | None = None


class Engine:
    """Runs training and evaluation over one model, cache and store; the caller makes, enters and owns them all.

    Args:
        layout: how a batch is looked up (`Converted.layout`).
        cache: the rows; its streams are those of the lanes.
        store: open, its schema checked.
        dense: the dense part of the model, whose embedding modules read from `cache`.
        prepare: makes a batch's model inputs of what it uploads; called in the data lane.
        settings: numbers.
        row_steps: settings of a batch's row updates, by table group of the layout (`bagpipe.training.row_steps`).
            Called once per batch, when its forward begins. None: those of `settings`, for all tables.
        trace: records every action.
        peers: the other ranks; None: there are none.
        claim: makes the namespace this job's, once every rank has its first batch; True if it held no rows before.
            Called in the data lane. Default: the store's own.
        recorder: makes checkpoints of what is trained, and guards what is written.
        known: rows that a checkpoint holds, which the store must therefore have: a missing one is a `LostRowError`.
            Rows that this process wrote are known without.
        wake: called when a run has failed: ends the wait for a batch that never comes (`RemoteBatches.interrupt`).
        await_batch: in training on a stream, see `Reading`.
        earlier: steps of earlier jobs that this one goes on counting.
        parts: further parts of the training loop, such as `WeightAverage`.
        reader: reads the rows of evaluations; None: the store.
    """

    def __init__(
        self,
        *,
        layout: LookupLayout,
        cache: RowCache,
        store: Store,
        dense: DensePart,
        prepare: PrepareInputs,
        settings: EngineSettings,
        row_steps: RowStepsOfBatch | None = None,
        trace: Trace | None = None,
        peers: Peers | None = None,
        claim: Callable[[], bool] | None = None,
        recorder: Recorder | None = None,
        known: IsWritten | None = None,
        wake: Callable[[], object] | None = None,
        await_batch: Callable[[float], bool] | None = None,
        earlier: EarlierSteps | None = None,
        parts: Sequence[LoopPart] = (),
        reader: RowReader | None = None,
    ) -> None:
        self.cache = cache
        self.store = store
        self.dense = dense
        self.settings = settings
        self._earlier = EarlierSteps() if earlier is None else earlier
        self.row_steps = going_on(_same_step(settings) if row_steps is None else row_steps, self._earlier)
        self.trace, self.layout = trace, layout
        self.prepare, self.peers = prepare, peers
        self._wake, self._await_batch = wake, await_batch
        self.recorder = recorder
        self.parts = with_decay(parts, cache, layout)
        self._reader: RowReader = store if reader is None else reader
        self._claim = store.claim if claim is None else claim
        self._known: list[KnownRows] = [] if known is None else [lambda batch, table, ids: known(table, ids)]
        if recorder is not None:
            self._known.append(lambda batch, table, ids: recorder.written.contains(table, ids))
        self._run: LoopRun | None = None  # the one under way

    def abort(self, error: BaseException) -> None:
        """End the run under way, if there is one, with this error. From any thread."""
        if (run := self._run) is not None:
            run.abort(error)

    def request_stop(self) -> None:
        """Finish the batches that the run under way has read, and end it; a second request aborts. From any thread."""
        if (run := self._run) is not None and run.runner is not None:
            run.runner.request_stop()

    def train(
        self,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] | None = None,
        on_batch: OnBatch | None = None,
    ) -> RunResult:
        """Train on the batches and write every updated row back; then the recorder's last checkpoint.

        On SIGINT or SIGTERM the batches already read are finished and written back (`RunResult.report.stopped`).

        Args:
            batches: what to train on.
            first_batch: number of the first of them; model, optimizers, random state and store are as before it.
            carried: this rank's `Part.progress` of the checkpoint that is resumed from: `RunResult.progress` counts
                samples, losses and skipped batches of the whole job (rows and times: this process).
            on_batch: called after every batch.

        Raises:
            StoreError: the store failed; rows not acknowledged are still dirty in the cache.
            LostRowError: a row that was written is not in the store. Nothing was trained on its loss.
            JobError: a checkpoint could not be written, or a loss or gradient is not finite.
        """
        self.dense.model.train()
        with self.train_in_steps(batches, first_batch=first_batch, carried=carried, stops_on_signals=True) as run:
            return run.whole(on_batch)

    @contextmanager
    def train_in_steps(
        self,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] | None = None,
        stops_on_signals: bool = False,
    ) -> Iterator[SteppedRun]:
        """A run of training whose batches the caller computes, one at a time and in its own thread.

        The mode of the model (`nn.Module.train`) is the caller's. A run that is left before `SteppedRun.end` is given
        up: dirty rows are not written.

        Args:
            batches, first_batch, carried: see `train`.
            stops_on_signals: SIGINT and SIGTERM stop the run as they stop `train`.
        """
        with self._training(batches, first_batch, carried, stops_on_signals=stops_on_signals) as run:
            run.start()
            try:
                yield run
            finally:
                run.give_up()

    def evaluate(
        self, batches: Iterator[RankBatch], on_scores: OnScores, *, on_batch: OnBatch | None = None, loss: Loss = BCE
    ) -> RunResult:
        """Score the batches; changes neither model nor rows nor store.

        Args:
            batches: what to score.
            on_scores: called with logits and labels ``[num_examples]`` of every batch, on the host, in order: in the
                compute lane when they have come there, the last ones by the caller.
            on_batch: called after every batch.
            loss: whose sum is counted.
        """
        self.dense.model.eval()
        scoring = Scoring(self.dense.model, self.cache.streams, on_scores, loss)
        with self.evaluate_in_steps(batches, scoring, stops_on_signals=True) as run:
            return run.whole(on_batch)

    @contextmanager
    def evaluate_in_steps(
        self, batches: Iterator[RankBatch], scoring: Scoring | Outputs, *, stops_on_signals: bool = False
    ) -> Iterator[SteppedRun]:
        """A run of evaluation whose batches the caller scores, one at a time and in its own thread.

        The mode of the model (`nn.Module.eval`) is the caller's. Args: see `evaluate`.
        """
        with self._evaluating(batches, scoring, stops_on_signals=stops_on_signals) as run:
            run.start()
            try:
                yield run
            finally:
                run.give_up()

    @contextmanager
    def _evaluating(
        self, batches: Iterator[RankBatch], scoring: Scoring | Outputs, *, stops_on_signals: bool
    ) -> Iterator[SteppedRun]:
        """A run of evaluation, not started."""
        cache, peers = self.cache, self.peers
        reading, depth = self._reading(), self.settings.prefetch_depth
        known = [] if self.settings.expires else self._known  # rows that expired were written, too
        rows = EvaluationRows(cache=cache, store=self._reader, prefetch_depth=depth, known=known)
        lookups = LocalRows(cache) if peers is None else EvaluationExchange(cache, peers)
        totals = Totals(rows, scoring.loss_sums)
        run = LoopRun(batches=batches, parts=(reading, rows, lookups, scoring, LookupGuard(cache.verdicts), totals))
        with ExitStack() as stack:
            for part in (self.dense, *self.parts):
                stack.enter_context(part.evaluating())
            runner = stack.enter_context(self._running(run, reading, stops_on_signals=stops_on_signals))
            yield SteppedRun(run, runner, rows, totals, partial(self._end, run, reading, totals))

    @contextmanager
    def _training(
        self,
        batches: Iterator[RankBatch],
        first_batch: int,
        carried: Mapping[str, Any] | None,
        *,
        stops_on_signals: bool,
    ) -> Iterator[SteppedRun]:
        """A run of training, not started."""
        cache, peers, delay, expires = self.cache, self.peers, self.settings.rows_delay, self.settings.expires
        reading, depth = self._reading(self._await_batch), self.settings.prefetch_depth
        guard = NonfiniteGuard(cache.streams, self.dense, cache.verdicts, rank=None if peers is None else peers.rank)
        # A row of a batch that changes no rows is not written, and its id can be of a row that was, and expired.
        known = [] if expires and (guard.skips or cache.is_partial) else list(self._known)
        clips, givers, staged = self.dense.clip.limits_rows, self.dense.row_givers, self.dense.is_staged
        update: LoopPart
        if peers is None:
            skips = staged and guard.skips
            update = LocalRows(cache, self.row_steps, after_steps=staged, skips=skips, clips=clips, rows_delay=delay)
        else:
            update = exchanged = ExchangedRows(
                cache, peers, row_steps=self.row_steps, guard=guard, clips=clips, rows_delay=delay, givers=givers
            )
            if self.recorder is not None and not expires:
                known.append(exchanged.was_written)
        rows = Rows(
            cache=cache, store=self.store, prefetch_depth=depth, known=known, claim=self._claim, expires=expires
        )
        totals = Totals(rows, self.dense.loss_sums, lambda: self.dense.loss_scale.value)
        recording = None
        if self.recorder is not None:
            recording = Checkpointing(
                self.recorder,
                dense=self.dense,
                guard=guard,
                totals=totals,
                rows_delay=delay,
                num_updates=1 if peers is None else 2,
            )
        run = LoopRun(
            batches=batches,
            # The order of hooks and ends: the guard checks before a write is recorded; rows are flushed, and batches
            # counted, before the last checkpoint.
            parts=(reading, guard, rows, update, *self.parts, self.dense, totals, *filter(None, [recording])),
            first_batch=first_batch,
            carried=carried or {},
            earlier=self._earlier,
            trace=self.trace,
        )
        with self._running(run, reading, stops_on_signals=stops_on_signals) as runner:
            yield SteppedRun(
                run,
                runner,
                rows,
                totals,
                partial(self._end, run, reading, totals),
                checkpointing=recording,
                exchanges=peers is not None and not expires,  # at a rest, all ranks have deleted what expires
                begun_ahead=delay,
            )

    def _reading(self, await_batch: Callable[[float], bool] | None = None) -> Reading:
        return Reading(
            layout=self.layout,
            cache=self.cache,
            prepare=self.prepare,
            read_ahead=self.settings.read_ahead,
            peers=self.peers,
            trace=self.trace,
            await_batch=await_batch,
        )

    @contextmanager
    def _running(self, run: LoopRun, reading: Reading, *, stops_on_signals: bool) -> Iterator[Runner]:
        """The runner of a run, composed of the run's parts."""
        peers = self.peers
        builder = LoopBuilder(read_ahead=self.settings.read_ahead)

        def finish_batch(b: int) -> None:
            for part in run.parts:
                part.finish_batch(b)

        try:
            for part in run.parts:
                part.start(run)
            for part in run.parts:
                part.declare(builder)
            composition = builder.build()
            run.runner = runner = Runner(
                composition.loop,
                handlers_of(run.parts, composition),
                {name: hazard for part in run.parts for name, hazard in part.hazards().items()},
                streams=self.cache.streams,
                trace=self.trace,
                on_batch=finish_batch,
                agree=reading.agree if peers is not None else None,
                # Now: the others are waiting for this rank's part of an exchange.
                on_error=peers.report if peers is not None else None,
                wake=self._wake,
                grace_s=max(_GRACE_S, peers.timeout_s + 10) if peers is not None else _GRACE_S,
                first_batch=run.first_batch,
                orders={lane: order for part in run.parts for lane, order in part.orders().items()},
            )
            self._run = run
            # Until the last write-back: a signal during it must not lose it.
            with _stop_on_signals(runner) if stops_on_signals else nullcontext():
                yield runner
        finally:
            self._run = None
            for part in run.parts:
                part.close()
            # Parts live on: they must not keep batches, their areas on the device and the lanes alive.
            run.in_flight.clear()
            run.parts, run.batches, run.runner = (), iter(()), None

    def _end(self, run: LoopRun, reading: Reading, totals: Totals) -> RunResult:
        """All lanes have ended: write back what is dirty, end the parts, and agree with the other ranks on the end."""
        assert run.runner is not None, "it has run"
        for part in run.parts:
            part.end()
        report = reading.agree_on_end(run.runner.snapshot(), totals.num_batches)
        self.cache.clear()
        return RunResult(
            progress=totals.progress(),
            report=report,
            input_error=reading.input_error,
            checkpoint_stall_s=0.0 if self.recorder is None else self.recorder.stall_s,
        )


def _same_step(settings: EngineSettings) -> RowStepsOfBatch:
    """One optimizer for all tables."""
    lr, eps = settings.rows_lr, settings.eps
    if lr is None or eps is None:
        raise InputError(f"expected row_steps, or rows_lr and eps in the settings, got {settings}")
    return lambda b: RowStep(lr=lr, eps=eps, step=b + 1)


def _stop_on_signals(runner: Runner) -> AbstractContextManager[object]:
    """Signals reach the main thread only; a run in another thread is stopped by its caller."""
    is_main = threading.current_thread() is threading.main_thread()
    return StopOnSignals(runner.request_stop) if is_main else nullcontext()
