"""`Evaluator`: scores the held-out examples during training and after it, and says when training ends early.

before a batch, by steps or by epochs ──all ranks rest──> evaluation_run ──scores──> metrics, all ranks
    history ──best so far?──> checkpoint, named best        ──patience run out?──> training ends here
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import EvalConfig
from bagpipe.errors import InputError
from bagpipe.jobs.evaluation import evaluation_run
from bagpipe.jobs.session import JobSession
from bagpipe.training.current_rows import CurrentRows
from bagpipe.training.evaluation import Scoring
from bagpipe.training.learning_rates import epoch_of
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.training.plateau import PlateauFactor
from bagpipe.training.stepped_run import SteppedRun
from trainer.early_stop import Evaluation, EvaluationHistory
from trainer.groups import GroupColumn
from trainer.held_out import HeldOutBatches
from trainer.metrics import BinaryMetrics, Quality, left_out, metric_key, metric_of
from trainer.observe.reporter import Reporter
from trainer.tasks import Tasks

__all__ = ["EvaluationRecord", "Evaluator", "Scored"]

#: Key in `Part.progress`.
_KEY = "evaluations"


class EvaluationRecord(LoopPart):
    """The history of evaluations, kept in checkpoints. Equal on all ranks.

    Attributes:
        history: so far.
    """

    name = _KEY

    def __init__(self) -> None:
        self.history = EvaluationHistory()

    def start(self, run: LoopRun) -> None:
        record = run.carried.get(_KEY)
        self.history = EvaluationHistory() if record is None else EvaluationHistory.from_json(record)

    def counters(self) -> Mapping[str, Any]:
        return {_KEY: self.history.to_json()} if self.history.evaluations else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The end of an evaluation.

    Attributes:
        quality: of all held-out examples, equal on all ranks.
        is_stopped: the job was interrupted, so examples are missing.
        error: the held-out examples cannot be used; the same on every rank.
    """

    quality: Quality
    is_stopped: bool = False
    error: InputError | None = None


class Evaluator:
    """Evaluations of one job on this rank. All ranks make the same calls.

    Args:
        settings: how often, and what is best.
        session: trains.
        held_out: their batches.
        record: keeps the history.
        reporter: told what is scored.
        group: number of the feature whose ids are the groups of the examples; None: they have none.
        rows: a part of the training; None: its updated rows are written before an evaluation, which reads the store.
        tasks: labels and weights of the examples.

    Attributes:
        error: held-out examples cannot be used; no evaluation follows. None so far.

    Raises:
        InputError: `eval.metric` names a label that the data does not have.
    """

    def __init__(
        self,
        settings: EvalConfig,
        session: JobSession,
        held_out: HeldOutBatches,
        record: EvaluationRecord,
        reporter: Reporter,
        group: int | None = None,
        rows: CurrentRows | None = None,
        *,
        tasks: Tasks,
    ) -> None:
        self.error: InputError | None = None
        self._settings = dataclasses.replace(settings, metric=metric_key(settings.metric, tasks))
        self._session = session
        self._held_out = held_out
        self._rows = rows
        self._record = record
        self._reporter = reporter
        self._group = group
        self._tasks = tasks
        self._cache: RowCache | None = None  # of evaluations during training
        self._quality: Quality | None = None
        self._plateau = next((part for part in session.job.parts if isinstance(part, PlateauFactor)), None)
        self._epoch = int((session.job.checkpoints.reader_state or {}).get("epoch", 0))  # of the batch before the next

    @property
    def history(self) -> EvaluationHistory:
        """Evaluations so far, those of the checkpoint included."""
        return self._record.history

    @property
    def skipped_rows(self) -> int:
        """Malformed rows skipped in the latest evaluation."""
        return self._held_out.skipped_rows

    def prepare(self) -> None:
        """Ask for the held-out examples of the next evaluation: they are read and planned while training goes on."""
        if self._settings.every and self.error is None:
            self._held_out.prepare()

    def is_due(self) -> bool:
        """An evaluation comes before the next batch of the run, between two steps.

        Raises: see `SteppedRun.peek`.
        """
        settings, run = self._settings, self._session.run
        assert run is not None, "between two steps"
        if not settings.every or self.error is not None or run.next_batch in (0, self.history.last_step):
            return False
        if settings.unit == "step":
            return not run.next_batch % settings.every
        batch, before = run.peek(), self._epoch
        if batch is None:  # the evaluation after training follows
            return False
        self._epoch = epoch_of(batch, "evaluations by epochs")
        return self._epoch > before and not self._epoch % settings.every

    def evaluate(self, step: int) -> bool:
        """Evaluate between two steps of a run.

        A stop ends the evaluation, if training can end here too: it is made when the job is started again. What is
        trained after it, and when training ends, can depend on it.

        Returns:
            Training ends here: patience has run out, or the job is stopped.

        Raises: see `JobSession.flush` and `JobSession.checkpoint`.
        """
        session, run = self._session, self._session.run
        assert run is not None, "between two steps"
        if step == session.job.checkpoints.first_batch and run.peek() is None:
            # A checkpoint's rows come back with the first batch: there is none.
            session.job.checkpoints.claim_if_resumed()
        if self._rows is None:
            session.flush("evaluate", step)
        with session.failing():
            if self._rows is not None:
                run.rest()
            scored = self._score(training=run)
        self.error = scored.error
        if scored.error is not None or scored.is_stopped:
            return scored.is_stopped
        self._reporter.evaluation(step, scored.quality)
        self._reporter.phase("training")
        self._note(step, scored.quality)
        if self._plateau is not None:
            self._plateau.note(scored.quality.named()[self._settings.metric])
        if self._settings.keep_best and self.history.best_step == step:
            session.checkpoint(step)
            self.name_best()
        self.prepare()
        return self.history.is_over(self._settings)

    def name_best(self) -> None:
        """Name the checkpoint of the best evaluation, if it is still to be named: on rank 0, when it is published."""
        history, job = self.history, self._session.job
        if self._settings.keep_best and history.best_step is not None and job.ranks.is_first:
            assert history.best_value is not None, "there is a best evaluation"
            job.checkpoints.name_best(history.best_step, self._settings.metric, history.best_value)

    def final(self, step: int) -> Scored:
        """The evaluation after training: of all held-out examples.

        Args:
            step: batches trained.
        """
        if self.history.last_step == step and not self._settings.batches and self._quality is not None:
            return Scored(quality=self._quality)
        scored = self._score()
        if scored.error is None and not scored.is_stopped:
            self._reporter.evaluation(step, scored.quality)
        is_next = self._settings.every and not self._settings.batches and self.history.last_step != step
        if is_next and scored.error is None and not scored.is_stopped:
            self._note(step, scored.quality)
            if self.history.best_step == step:
                self.name_best()  # the end of training has made its checkpoint
        return scored

    def _note(self, step: int, quality: Quality) -> None:
        evaluation = Evaluation(step=step, metrics=quality.named())
        higher_is_better = metric_of(self._settings.metric).higher_is_better
        assert higher_is_better is not None, "eval.metric has a direction"
        self._record.history = self.history.after(evaluation, self._settings, higher_is_better=higher_is_better)
        self._quality = quality

    def _score(self, training: SteppedRun | None = None) -> Scored:
        """Score the held-out examples; `training` rests meanwhile, or there is none."""
        self._reporter.phase("evaluating")
        job, groups = self._session.job, None if self._group is None else GroupColumn(self._group)
        metrics = BinaryMetrics(groups, tasks=self._tasks)
        ranks = job.ranks
        batches, reader, cache = self._held_out.batches(in_training=training is not None), None, job.engine.cache
        if training is not None:
            self._cache = cache = job.job.new_cache() if self._cache is None else self._cache
        with ExitStack() as stack:
            stack.enter_context(closing(batches))
            if training is not None and self._rows is not None:
                reader = stack.enter_context(self._rows.reading(job.engine.cache, job.engine.store))
            run = stack.enter_context(
                evaluation_run(
                    job,
                    batches if groups is None else groups.watched(batches),
                    Scoring(job.job.model, job.engine.cache.streams, metrics.add, self._tasks.loss),
                    peers=None if ranks.peers is None else ranks.peers.evaluation(),
                    cache=cache,  # the training's is empty between two runs
                    reader=reader,
                    wake=self._held_out.interrupt,
                    stops_on_signals=training is None,
                )
            )
            while run.step() is not None:
                if training is not None and training.is_stopping and training.can_end_here:
                    run.stop()
            result = run.end()
        if training is not None:
            self._held_out.settle(lambda can: all(ranks.gather(can)))
        error = result.input_error
        for text in filter(None, ranks.gather(None if error is None else str(error))):
            return Scored(quality=left_out(text, has_groups=groups is not None), error=error or InputError(text))
        if result.report.stopped:
            return Scored(quality=Quality(), is_stopped=True)
        if ranks.peers is not None:
            metrics = metrics.gathered(ranks.collect)
        quality = ranks.share(dataclasses.asdict(metrics.quality()) if ranks.is_first else None)
        return Scored(quality=Quality(**quality))
