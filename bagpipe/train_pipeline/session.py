"""`Session`: the training of a pipeline over its user's iterators, by a `JobSession`.

opened ──> step_on(iterator) ──begins a run──> step, step, … ──end──> the next iterator begins another run
several ranks: all make the same calls between the same batches; a rank that fails tells the others first
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from bagpipe.dense.parallel.broadcast import RankBuffers
from bagpipe.errors import InputError, JobError
from bagpipe.jobs.session import JobSession
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.train_pipeline.batch_ids import BatchIds
from bagpipe.train_pipeline.initial_rows import InitialRows
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.open_pipeline import OpenPipeline, open_pipeline
from bagpipe.train_pipeline.optimizer import group_settings, set_groups
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.row_sources import RowChunks
from bagpipe.train_pipeline.saved_state import SavedState
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.digest import dense_digest
from bagpipe.training.stepped_run import SteppedRun
from bagpipe.training.user_state import UserState, saved_state
from bagpipe.types.batch import Batch

__all__ = ["Session"]


class Session:
    """One job on this rank. One thread calls it.

    Args:
        model: what is trained.
        options: settings.

    Attributes:
        position: of the next batch.
    """

    def __init__(self, model: ModelParts, options: Options) -> None:
        self.position = Position()
        self._model = model
        self._options = options
        self._batches = UserBatches(BatchIds(model.features, options.sparse), model.device, options.accumulate)
        self._initial = InitialRows.of(model)
        self._open: OpenPipeline | None = None
        self._iterator: Iterator[Any] | None = None
        self._is_abandoned = False
        self._leaves_out = False
        self._next_loader: Any = None
        self._tracked: dict[str, Any] = {}
        self._resumed: Mapping[str, Any] = {}
        self._is_cut_short = False
        self._evaluation: Generator[Any, None, Exception | None] | None = None
        self._is_closed = False

    def opened(self) -> OpenPipeline:
        """The open parts; opens them if they are not.

        Raises:
            JobError: the session is closed, has failed, or evaluates.
        """
        self._check_usable()
        if self._open is None:
            parts = (UserState(self._state_at),) if self._options.checkpoint_dir else ()
            self._open = open_pipeline(self._model, self._options, self._batches, self._initial, parts)
            session = self._open.session
            step, saved = session.job.checkpoints.first_batch, saved_state(session.carried)
            self._go_to(SavedState.from_saved(saved, step) if saved is not None else SavedState.at(step))
        return self._open

    def current_position(self) -> Position:
        """Position of the next batch, that of a resumed checkpoint included."""
        if not (self._is_closed or self._failure() is not None or self._evaluation is not None):
            self.opened()
        return self.position

    @property
    def has_folder(self) -> bool:
        """There is a folder for checkpoints."""
        return bool(self._options.checkpoint_dir)

    def use_folder(self, folder: str) -> None:
        """Make checkpoints in a folder. Raises: see `Options.in_folder`."""
        self._options = self._options.in_folder(folder, is_open=self._open is not None)

    def checkpoint(self) -> None:
        """Make a checkpoint of the batches trained so far. The end of an iterator has made one already."""
        session = self.opened().session
        if session.run is not None:
            session.run.check_between_batches()
        session.checkpoint(self.position.step)

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
        is_stateful = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._next_loader = loader if is_stateful else None
        if not self._leaves_out:
            return 0
        if is_stateful and self.position.loader is not None:
            loader.load_state_dict(self.position.loader)
            return 0
        return self.position.taken

    def abandon(self, iterator: Iterator[Any]) -> None:
        """Note that an iterator is not used any more. Another one can begin, or the session be closed."""
        self._is_abandoned = iterator is self._iterator

    def step_on(self, iterator: Iterator[Any]) -> tuple[Any, bool]:
        """Train the next batch of an iterator. Returns the model's outputs, and whether the iterator has ended.

        Raises: see `TrainPipeline.progress`.
        """
        session = self.opened().session
        run = self._running_on(iterator, session)
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

    def load(self, rows: RowChunks) -> None:
        """Begin training with some rows. Raises: see `InitialRows.add`."""
        self._check_usable()
        self._initial.add(rows, self.position.step)

    def flush(self, call: str = "flush") -> None:
        """Write all updated rows to the store, and those loaded. All ranks make the same call."""
        self._check_usable()
        opened = self.opened() if self._initial.is_pending else self._open
        if opened is not None:
            opened.session.flush(call, self.position.step, claims=self._initial.is_pending)

    def resting(self, call: str) -> OpenPipeline:
        """The open parts, after `flush`: until the next batch no lane of the training acts."""
        opened = self.opened()
        self.flush(call)
        return opened

    def evaluating(
        self, evaluation: Callable[[OpenPipeline], Generator[Any, None, Exception | None]]
    ) -> Generator[Any, None, None]:
        """Outputs of an evaluation that is made here. No lane of the training acts, and the store is current.

        Raises:
            Exception: as the evaluation. With several ranks the session has then failed, unless the loader failed.
        """
        opened = self.resting("evaluate")
        self._evaluation = evaluation(opened)
        try:
            error = yield from self._evaluation
        except Exception as raised:
            if opened.job.ranks.peers is not None:
                opened.session.fail(raised)
            raise
        finally:
            self._evaluation = None
        if error is not None:
            raise error
        if self._is_closed:
            raise JobError("the pipeline is closed")

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
        if self._is_closed:
            return
        self._is_closed = True
        opened = self._open
        if opened is None or self._failure() is not None:
            return
        job, session = opened.job, opened.session
        if error is not None and job.ranks.peers is not None:
            self._give_up(opened, error)
            return
        with session, session.failing():
            job.meet("close", self.position.step)
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

    # ---- the run under way ---------------------------------------------------------------------------------------

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
        state = None if loader is None else loader.state_dict
        planned = self._planned(self._batches.read(iterator, self.position, state))
        run = session.begin(planned, self.position.step)
        self._iterator, self._is_abandoned, self._leaves_out = iterator, False, False
        return run

    def _planned(self, ids: Iterator[Batch]) -> Generator[RankBatch, None, None]:
        """Planned batches of a run. Notes whether the planner has failed."""
        self._is_cut_short = True
        with closing(self.opened().planner.run(ids, self.position.step)) as planned:
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
