"""`Session`: the training of a pipeline over its user's iterators, by a `JobSession`.

opened ──> step_on(iterator) ──begins a run──> step, step, … ──end──> the next iterator begins another run
several ranks: all make the same calls between the same batches; a rank that fails tells the others first
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

from bagpipe.dense.parallel.broadcast import RankBuffers
from bagpipe.errors import InputError, JobError
from bagpipe.jobs.open_job import OpenJob
from bagpipe.jobs.session import JobSession
from bagpipe.lookahead.interface import BatchPlanner
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.train_pipeline.batch_ids import BatchIds
from bagpipe.train_pipeline.initial_rows import InitialRows
from bagpipe.train_pipeline.lifetime import Lifetime, whole_call
from bagpipe.train_pipeline.loader_state import LoaderState
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.open_pipeline import OpenPipeline, open_pipeline
from bagpipe.train_pipeline.optimizer import group_settings, set_groups
from bagpipe.train_pipeline.optimizer_rest import OptimizerRest, load_optimizer_state, optimizer_state
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.row_sources import RowChunks
from bagpipe.train_pipeline.saved_state import SavedState
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.digest import dense_digest
from bagpipe.training.part import LoopPart
from bagpipe.training.stepped_run import SteppedRun
from bagpipe.training.user_state import UserState, saved_state
from bagpipe.types.batch import Batch

__all__ = ["Session"]


class Session:
    """One job on this rank. Calls are made one after another: see `Lifetime`.

    Args:
        model: what is trained.
        options: settings.
        owner: of the session; when it is gone, the session is closed.

    Attributes:
        position: of the next batch.
    """

    def __init__(self, model: ModelParts, options: Options, owner: object) -> None:
        self.position = Position()
        self._model = model
        self._options = options
        self._batches = UserBatches(BatchIds(model.features, options.sparse), model.device, options.accumulate)
        self._initial = InitialRows.of(model)
        self._rest = OptimizerRest(model.converted.model, model.optimizer)
        if options.checkpoint_dir:
            self._rest.check()
        self._open: OpenPipeline | None = None
        self._iterator: Iterator[Any] | None = None
        self._is_abandoned = False
        self._leaves_out = False
        self._next_loader: LoaderState | None = None
        self._noted: set[str] = set()
        self._tracked: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] = {}
        self._is_cut_short = False
        self._evaluation: Generator[Any, None, Exception | None] | None = None
        self._is_closed = False
        self._life = Lifetime(owner, self.close, lambda: 0 if self._open is None else self._open.num_unwritten)

    @whole_call
    def opened(self) -> OpenPipeline:
        """The open parts; opens them if they are not.

        Raises:
            JobError: the session is closed, has failed, or evaluates.
        """
        self._check_usable()
        if self._open is None:
            self._life.begin()
            parts = (UserState(self._state_at), self._rest) if self._options.checkpoint_dir else ()
            self._open = open_pipeline(self._model, self._options, self._batches, self._initial, parts)
            session = self._open.session
            step, saved = session.job.checkpoints.first_batch, saved_state(session.carried)
            if step and not self._rest.is_loaded:
                self._rest.check_older()
            self._go_to(SavedState.from_saved(saved, step) if saved is not None else SavedState.at(step))
        return self._open

    def current_position(self) -> Position:
        """Position of the next batch, that of a resumed checkpoint included."""
        # No call: a loader that reads it would wait for the one that waits for its batches.
        if self._open is None and not (self._is_closed or self._evaluation is not None):
            self.opened()
        return self.position

    @property
    def has_folder(self) -> bool:
        """There is a folder for checkpoints."""
        return bool(self._options.checkpoint_dir)

    def use_folder(self, folder: str) -> None:
        """Make checkpoints in a folder. Raises: see `Options.in_folder`, `OptimizerRest.check`."""
        self._rest.check()
        self._options = self._options.in_folder(folder, is_open=self._open is not None)

    @whole_call
    def checkpoint(self) -> None:
        """Make a checkpoint of the batches trained so far, in place of one that the end of an iterator has made."""
        session = self.opened().session
        if session.run is not None:
            session.run.check_between_batches()
        session.checkpoint(self.position.step, again=True)

    def track(self, name: str, tracked: Any) -> None:
        """Keep the state of an object in checkpoints; give it back its own, if the session has resumed one."""
        self.opened()
        self._tracked[name] = tracked
        if name in self._resumed:
            tracked.load_state_dict(self._resumed[name])

    def state(self) -> SavedState:
        """Position of the next batch, hashes of batches read already, states of tracked objects."""
        run = None if self._open is None else self._open.session.run
        if run is not None:
            run.check_between_batches()
        return SavedState(
            position=self.position,
            hashes=self._batches.hashes(self.position.step),
            groups=group_settings(self._model.optimizer),
            tracked={name: tracked.state_dict() for name, tracked in self._tracked.items()},
        )

    def go_to(self, state: SavedState) -> None:
        """Go on from a state.

        Raises:
            InputError: batches of an iterator are under way.
        """
        session = self.opened().session
        self._initial.drop_at(state.position.step)
        if session.run is not None:
            raise InputError("a state is loaded before the first batch of an iterator: call reset() first")
        self._go_to(state)

    def optimizer_state(self) -> dict[str, Any]:
        """Copy of the optimizer's ``state_dict``, and of tensors that other parts of the loop keep beside it."""
        return optimizer_state(self._model.optimizer, self._other_parts(), self.position.step)

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take back `optimizer_state`.

        Raises:
            InputError: it lacks the tensors of a part.
        """
        load_optimizer_state(self._model.optimizer, self._other_parts(), self.position.step, state)

    def _other_parts(self) -> Iterator[LoopPart]:
        return (part for part in self.opened().job.parts if part is not self._rest)

    def _go_to(self, state: SavedState) -> None:
        if state.groups:
            set_groups(self._model.optimizer, state.groups)
        self.position = state.position
        self._leaves_out = bool(state.position.taken)
        self._batches.expected = state.hashes
        self._resumed = state.tracked
        for name, tracked in self._tracked.items():
            if name in state.tracked:
                tracked.load_state_dict(state.tracked[name])

    def _state_at(self, step: int) -> Mapping[str, Any]:
        """The state that a checkpoint keeps."""
        assert self.position.step == step, "checkpoints begin inside a step"
        return self.state().to_saved()

    def resume(self, loader: Any) -> int:
        """Set a stateful loader to the position of the next batch, and keep its state from now on.

        Returns:
            Batches that the caller must leave out, because the loader has no state.
        """
        self.opened()
        self._next_loader = state = LoaderState(loader, self._noted)
        if not self._leaves_out:
            return 0
        if state.is_kept and self.position.loader is not None:
            state.load(self.position.loader)
            return 0
        return self.position.taken

    def abandon(self, iterator: Iterator[Any]) -> None:
        """Note that an iterator is not used any more. Another one can begin, or the session be closed."""
        self._is_abandoned = iterator is self._iterator

    @whole_call
    def step_on(self, iterator: Iterator[Any]) -> tuple[Any, bool]:
        """Train the next batch of an iterator. Returns the model's outputs, and whether the iterator has ended.

        Raises: see `TrainPipeline.progress`.
        """
        session = self.opened().session
        run = self._running_on(iterator, session)
        run.await_batch(self._life.check_signals)
        with session.failing():
            part = run.step_part()
        if part is None:
            self._finish(session)
            return None, True
        self._advance(run.next_batch)
        return self._model.executor.outputs if part.inputs is not None else None, False

    @property
    def replicas(self) -> RankBuffers | None:
        """The dense part on all ranks; None if the session is not open, or alone."""
        is_open = self._failure() is None and not self._is_closed
        return self._open.job.replicas if self._open is not None and is_open else None

    @whole_call
    def load(self, rows: RowChunks) -> None:
        """Begin training with some rows. Raises: see `InitialRows.add`."""
        self._check_usable()
        self._initial.add(rows, self.position.step)

    @whole_call
    def flush(self, call: str = "flush") -> None:
        """Write all updated rows to the store, with those loaded or of a checkpoint. All ranks make the same call."""
        self._check_usable()
        opened = self.opened() if self._initial.is_pending else self._open
        if opened is not None:
            has_rows = self._initial.is_pending or opened.job.checkpoints.resume_point.is_trained
            opened.session.flush(call, self.position.step, claims=has_rows)

    def call(self) -> AbstractContextManager[None]:
        """Around something that is done with the open parts: see `Lifetime.call`."""
        return self._life.call()

    @contextmanager
    def resting(self, call: str) -> Iterator[OpenJob]:
        """The job, after `flush`, in one call: no lane of the training acts."""
        with self.call():
            job = self.opened().job
            self.flush(call)
            yield job

    def evaluating(
        self,
        evaluation: Callable[[OpenPipeline, Callable[[], object]], Generator[Any, None, Exception | None]],
    ) -> Generator[Any, None, None]:
        """Outputs of an evaluation that is made here. No lane of the training acts, and the store is current.

        Raises:
            Exception: as the evaluation. With several ranks the session has then failed, unless the loader failed.
        """
        opened = self.opened()
        self.flush("evaluate")
        self._evaluation = outputs = evaluation(opened, self._life.check_signals)
        left: Exception | None = None
        try:
            while True:
                with self.call():
                    try:
                        output = next(outputs)
                    except StopIteration as end:
                        left = end.value
                        break
                yield output
        except Exception as raised:
            if opened.job.ranks.peers is not None:
                opened.session.fail(raised)
            raise
        finally:
            outputs.close()
            self._evaluation = None
        if left is not None:
            raise left
        if self._is_closed:
            raise JobError("the pipeline is closed")

    @whole_call
    def reset(self) -> None:
        """Give up the iterator under way; updated rows are written."""
        self.flush("reset")
        if self._open is not None and self._open.session.run is not None:
            self._next_iterator()
            with self._open.session.failing():
                self._leave(self._open.session)
                self._open.job.engine.cache.clear()  # of rows inserted ahead

    def close(self, error: BaseException | None = None) -> None:
        """Write all updated rows, and release everything. Idempotent.

        Args:
            error: of the caller, which ends the job; other ranks are told.
        """
        if self._is_closed or self._life.is_elsewhere:
            return
        with self.call():
            self._is_closed = True
            self._life.end()
            if self._open is not None and self._failure() is None:
                self._end(self._open, error)

    def _end(self, opened: OpenPipeline, error: BaseException | None) -> None:
        job, session = opened.job, opened.session
        if error is not None and job.ranks.peers is not None:
            self._give_up(opened, error)
            return
        with session, session.failing():
            session.renew_checkpoint("close", self.position.step)
            if self._evaluation is not None:
                self._evaluation.close()
            is_stopped = session.run is not None
            session.write_rows(makes_checkpoint=bool(self._options.checkpoint_dir))
            if session.run is not None:
                session.leave()
            job.meet("close: rows are written", self.position.step)
            if error is None and job.ranks.is_first:
                job.checkpoints.claim.finish(
                    steps=self.position.step,
                    dense_digest=dense_digest(self._model.converted.model, self._model.optimizer),
                    stopped=is_stopped,
                )

    def _give_up(self, opened: OpenPipeline, error: BaseException) -> None:
        """Release everything after an error of the caller, who raises it; with several ranks."""
        opened.job.tell(error)
        if self._evaluation is not None:
            with suppress(BaseException):  # what ends now ends because of the error
                self._evaluation.close()
        with suppress(BaseException):
            opened.session.fail(error)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise JobError("the pipeline is closed")
        failure = self._failure()
        if failure is not None:
            raise JobError(f"the pipeline has failed: {failure!r}")
        if self._evaluation is not None:
            raise JobError("an evaluation is under way: exhaust or close its iterator first")

    def _failure(self) -> BaseException | None:
        return None if self._open is None else self._open.session.failure

    def _running_on(self, iterator: Iterator[Any], session: JobSession) -> SteppedRun:
        """The run on an iterator; begins one if there is none."""
        if not self._model.converted.model.training:
            raise InputError("the model is in evaluation mode: call model.train() to train, or pipeline.evaluate")
        if session.run is not None and self._is_abandoned:
            self.reset()
        if session.run is not None:
            if iterator is not self._iterator:
                raise InputError(
                    "progress was given another iterator, but batches of the one before are under way: exhaust that "
                    "one, or drop them with reset()"
                )
            return session.run
        self._batches.reset()
        loader, self._next_loader = self._next_loader, None
        state = None if loader is None else loader.read
        session.renew_checkpoint("progress", self.position.step)
        planned = self._planned(self.opened().planner, self._batches.read(iterator, self.position, state))
        run = session.begin(planned, self.position.step)
        self._iterator, self._is_abandoned, self._leaves_out = iterator, False, False
        return run

    def _planned(self, planner: BatchPlanner, ids: Iterator[Batch]) -> Generator[RankBatch, None, None]:
        """Planned batches of a run, made in a lane. Notes whether the planner has failed."""
        self._is_cut_short = True
        with closing(planner.run(ids, self.position.step)) as planned:
            yield from planned
        self._is_cut_short = self._batches.error is not None

    def _advance(self, step: int) -> None:
        """Note that the batches before one are trained."""
        after = self._batches.after(step - 1)
        self.position = dataclasses.replace(self.position, step=step) if after is None else after
        self._batches.forget(step)

    def _next_iterator(self) -> None:
        self.position = Position(step=self.position.step, epoch=self.position.epoch + 1)

    def _finish(self, session: JobSession) -> None:
        """End a run after its last batch. Raises the error of its data."""
        if not self._is_cut_short:
            self._next_iterator()  # before the end, whose checkpoint is one between two iterators
        result = session.end()
        self._iterator, self._is_abandoned = None, False
        error = self._batches.error or result.input_error
        if error is not None:
            raise error

    def _leave(self, session: JobSession) -> None:
        session.leave()
        self._iterator, self._is_abandoned = None, False
