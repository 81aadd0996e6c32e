"""`Checkpoints`: resumes, records and publishes a job's checkpoints on one rank.

    start_generation ──> ResumePoint ──restore──> model, optimizer, random state      before the first batch
    Claim: the namespace is this job's and has the checkpoint's rows                  at the first batch
    Recorder ──Part──> Publisher ──> folder, store                                    during training

A job without `checkpoint.dir` has a claim too, and closes its writer logs periodically to bound their size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.best import Best, read_best, write_best
from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.dense_state import capture, check_model, load_of_rank, restore_random_state
from bagpipe.checkpoint.folder import Checkpoint, CheckpointFolder
from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest, Part
from bagpipe.checkpoint.mirror import CheckpointMirror, MirrorThread
from bagpipe.checkpoint.optimizer_state import new_optimizer
from bagpipe.checkpoint.publisher import Publisher
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.checkpoint.writer import CheckpointPaths
from bagpipe.config.sections import CheckpointConfig, StoreConfig
from bagpipe.errors import FencedError, InputError, JobError
from bagpipe.jobs.claim import Claim
from bagpipe.jobs.job_facts import JobFacts, changes
from bagpipe.jobs.ranks import Ranks
from bagpipe.jobs.resume_point import ResumePoint, start_generation
from bagpipe.start_from.dense import JobDense
from bagpipe.start_from.first_checkpoint import FirstCheckpoint, NewJob
from bagpipe.start_from.job_settings import expires, optimizer_name
from bagpipe.store.interface import Store
from bagpipe.training.dense import DensePart
from bagpipe.training.engine import IsWritten
from bagpipe.training.part import EarlierSteps, LoopPart
from bagpipe.training.weight_average import WeightAverage

__all__ = ["Checkpoints"]

#: Batches between closings of the writer logs of a job without checkpoints. A log takes 12 B per row written.
_CLOSE_EVERY = 1_000


class Checkpoints:
    """Checkpoints of one rank. On exit, drops unpublished checkpoints.

    Args:
        settings: the folder, and how often checkpoints are made and kept.
        namespace: the store's namespace, and what to do with rows of another job.
        ranks: the ranks of the job.
        facts: properties of the job that checkpoints are compared with.
        store: open store.
        cache: the row cache.
        read_ahead: batches read and not yet trained, at most.
        timeout_s: deadline of one exchange between ranks.
        dense: the dense part; equal on all ranks.
        parts: other parts of the training loop that keep tensors.
        clears_refused: see `Claim`.

    Attributes:
        resume_point: what the job starts from.
        claim: the job's claim on the store's namespace.
        recorder: recorder for the engine.

    Raises:
        InputError, StoreError: see `bagpipe.jobs.resume_point.start_generation`.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        namespace: StoreConfig,
        ranks: Ranks,
        facts: JobFacts,
        store: Store,
        *,
        cache: RowCache,
        read_ahead: int,
        timeout_s: float,
        dense: DensePart,
        parts: Sequence[LoopPart] = (),
        clears_refused: bool = True,
    ) -> None:
        self._settings = settings
        self._read_ahead = read_ahead
        self._timeout_s = timeout_s
        self._ranks = ranks
        self._facts = facts
        self._store = store
        self._parts = tuple(parts)
        self._stack = ExitStack()
        origin = _first_checkpoint(settings, facts, dense, self._parts, cache) if ranks.is_first else None
        self.resume_point: ResumePoint = start_generation(settings, namespace, ranks, facts, store, origin)
        self._rows: CheckpointRows | None = None
        self._publisher: Publisher | None = None
        self._mirror: MirrorThread | None = None
        self._dense = dense
        self._device = cache.device
        with self._undone_if_refused():
            checkpoint = self.resume_point.checkpoint
            if checkpoint is not None:
                try:
                    self._rows = CheckpointRows(checkpoint.folder, checkpoint.manifest, facts.rows)
                except BrokenCheckpoint as error:
                    raise InputError(str(error)) from None
            self.claim = Claim(
                namespace,
                ranks,
                store,
                self.resume_point,
                rows=self._rows,
                on_adopted=self._build_on,
                on_taken=self._mirror_first,
                deletes_rows=expires(facts.settings),
                clears_refused=clears_refused,
            )
            self.recorder = self._make_recorder(cache)

    def __enter__(self) -> Self:
        with self._undone_if_refused():
            self._restore()
        if self.resume_point.folder is not None:
            self._stack.callback(self.resume_point.folder.release)
        self._stack.enter_context(self.claim)
        self._stack.push(self._check_folder)
        if self._mirror is not None:
            self._stack.enter_context(self._mirror)
        self._stack.enter_context(self.recorder)
        return self

    def _undone_if_refused(self) -> AbstractContextManager[None]:
        """On rank 0, before rows are written: see `ResumePoint.undone_if_refused`."""
        return self.resume_point.undone_if_refused() if self._ranks.is_first else nullcontext()

    def _mirror_first(self) -> None:
        """On rank 0, when rows may be written: mirror what the job starts from."""
        if self._mirror is not None and self.resume_point.checkpoint is not None and self.resume_point.is_trained:
            self._mirror.offer(self.resume_point.checkpoint)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._publisher is not None:
            self._publisher.close()
        try:
            self._stack.__exit__(kind, error, trace)
        finally:
            if self._ranks.is_first and not self.claim.has_begun:
                self.resume_point.undo_if_refused(error)

    def _check_folder(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raise FencedError instead if another job has taken over the folder: it removes unfinished checkpoints."""
        folder = self.resume_point.folder
        if folder is None or not isinstance(error, JobError):
            return
        try:
            folder.check_newest(self.resume_point.generation)
        except FencedError as fenced:
            raise fenced from error

    @property
    def first_batch(self) -> int:
        return self.resume_point.first_batch

    @property
    def resumed_from(self) -> int | None:
        """Step of the loaded checkpoint of this job; None for initial values, or those of `origin`."""
        is_first = bool(self.origin) and not self.first_batch
        return self.first_batch if self.resume_point.is_trained and not is_first else None

    @property
    def origin(self) -> Mapping[str, Any]:
        """The origin of the job's first checkpoint (`Manifest.origin`); empty: initial values."""
        checkpoint = self.resume_point.checkpoint
        return checkpoint.manifest.origin if checkpoint is not None else {}

    @property
    def earlier(self) -> EarlierSteps:
        """Steps of earlier jobs that this one goes on counting."""
        counted = {field.name: self.origin.get(f"{field.name}_step", 0) for field in dataclasses.fields(EarlierSteps)}
        return EarlierSteps(**counted)

    @property
    def num_published(self) -> int:
        """Checkpoints written by this process."""
        return self._publisher.num_published if self._publisher is not None else 0

    @property
    def published_step(self) -> int | None:
        """Step of the newest checkpoint that this process published; None: it published none. Rank 0 only."""
        return self._publisher.newest.manifest.step if self._publisher is not None and self.num_published else None

    @property
    def reader_state(self) -> Mapping[str, Any] | None:
        """Reader state before the first batch; None: start of the data."""
        checkpoint = self.resume_point.checkpoint
        return checkpoint.manifest.reader_state if checkpoint is not None else None

    def _make_recorder(self, cache: RowCache) -> Recorder:
        checkpoint, rank, peers = self.resume_point.checkpoint, self._ranks.rank, self._ranks.peers
        paths = None
        every, on_part = _CLOSE_EVERY, self._close_logs
        if checkpoint is not None:
            folder, generation = self.resume_point.folder, self.resume_point.generation
            assert folder is not None, "there is a checkpoint"
            check_model(self._dense.model)
            self._publisher = self._make_publisher(folder, checkpoint.manifest.lineage)
            every, on_part = self._settings.every, self._publish
            paths = CheckpointPaths(
                generation=folder.generation_folder(generation),
                step=lambda step: folder.step_folder(generation, step),
            )
        return Recorder(
            rank=rank,
            every=every,
            first_batch=self.first_batch,
            paths=paths,
            on_part=on_part,
            inspect=self.claim.inspect,
            cache=cache,
            store=self._store,
            dense=self._dense,
            read_ahead=self._read_ahead,
            report=peers.report if peers is not None else None,
        )

    @property
    def known(self) -> IsWritten | None:
        """Test for rows that the checkpoint has, and the store therefore must have; None for initial values."""
        return self._contains if self.resume_point.is_trained else None

    def _restore(self) -> None:
        """Load the dense part and the tensors of other parts.

        Raises:
            InputError: the state belongs to another model or cannot be read.
        """
        checkpoint, dense = self.resume_point.checkpoint, self._dense
        if checkpoint is None or not self.resume_point.is_trained:
            return
        rank = self._ranks.rank
        has_own = rank < len(self.resume_point.parts)
        entries = [part.dense for part in self.resume_point.parts]
        try:
            state = load_of_rank(checkpoint.folder, entries, rank, is_staged=dense.is_staged)
        except BrokenCheckpoint as error:
            raise InputError(str(error)) from None
        dense.restore(state)
        for part in (dense, *self._parts):
            part.load_tensors(state.of_part(part.name))
        if has_own and state.rng():
            restore_random_state(state.rng(), self._device)

    def carried(self) -> Mapping[str, Any]:
        """Initial values of this rank's counters."""
        parts = self.resume_point.parts
        if len(parts) == self._ranks.world_size:
            return parts[self._ranks.rank].progress
        return _combined_progress(parts) if self._ranks.is_first else _common_progress(parts)

    # ---- the store -----------------------------------------------------------------------------------------------

    def _contains(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the checkpoint has each row."""
        assert self._rows is not None, "there is a checkpoint"
        return self._rows.contains(table, ids)

    def claim_if_resumed(self) -> None:
        """Collective: recover the rows of a resumed job that has no batches left to train, unless that is done."""
        if self.resume_point.is_trained and not self.claim.is_taken:
            self.claim.take()

    def name_best(self, step: int, metric: str, value: float) -> None:
        """On rank 0: name the published checkpoint of a step the best, unless it is named already.

        Raises:
            JobError: the folder cannot be written.
        """
        folder, start = self.resume_point.folder, self.resume_point.checkpoint
        assert folder is not None, "there is a folder"
        assert start is not None, "there is a folder"
        generation = start.manifest.generation if step == self.first_batch else self.resume_point.generation
        best = Best(generation=generation, step=step, metric=metric, value=value)
        try:
            if read_best(folder.path) != best:
                write_best(folder.path, best)
        except OSError as error:
            raise JobError(f"checkpoint.dir {folder.path} cannot be written: {error.strerror}") from None

    def check_rows(self) -> None:
        """On rank 0, after training: find rows that the store lost after their last use. See `Claim.check_rows`."""
        self.claim.check_rows(self._publisher.newest if self._publisher is not None else None)

    # ---- publishing ----------------------------------------------------------------------------------------------

    def _make_publisher(self, folder: CheckpointFolder, lineage: str) -> Publisher:
        facts, checkpoint = self._facts, self.resume_point.checkpoint
        assert checkpoint is not None, "there is a folder"
        template = Manifest(
            lineage=lineage,
            generation=self.resume_point.generation,
            step=0,
            parent_checkpoint_id="",
            token=self.resume_point.token,
            epoch=0,
            world_size=facts.world_size,
            settings=facts.settings,
            row_schema=facts.row_schema,
            identity=facts.identity_record,
            arithmetic=facts.arithmetic,
            changes=(*checkpoint.manifest.changes, *changes(checkpoint.manifest, facts)),
            origin=checkpoint.manifest.origin,
        )
        if self._settings.mirror and self._ranks.is_first:
            mirror = CheckpointMirror(self._settings.mirror)
            self._mirror = MirrorThread(mirror, keep=self._settings.keep, folder=folder.path)
        return Publisher(
            folder,
            checkpoint,
            template,
            facts.rows,
            rank=self._ranks.rank,
            ledger=self.claim.ledger,
            keep=self._settings.keep,
            full_every=self._settings.full_every,
            timeout_s=self._timeout_s,
            mirror=self._mirror,
        )

    def _build_on(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint the one that the next checkpoint builds on."""
        assert self._publisher is not None, "there is a folder"
        self._publisher.newest = checkpoint

    def _publish(self, step: int, epoch: int, part: Part | None) -> None:
        assert self._publisher is not None, "there is a folder"
        assert part is not None, "there is a folder"
        self._publisher.first_sums = self.claim.row_check.first_sums
        self._publisher(step, epoch, part)
        self.claim.has_published = True

    def _close_logs(self, step: int, epoch: int, part: Part | None) -> None:
        """Delete logs up to epoch - 2. Another rank may not have closed the log of the previous epoch yet."""
        if self._ranks.is_first and epoch > 2:
            self.claim.ledger.commit("", epoch - 2)


def _first_checkpoint(
    settings: CheckpointConfig, facts: JobFacts, dense: DensePart, parts: Sequence[LoopPart], cache: RowCache
) -> FirstCheckpoint | None:
    """Makes checkpoint 0 of a new job from other weights, if `checkpoint.start_from` names them."""
    if not settings.start_from:
        return None
    optimizer = dense.optimizer
    is_plain = type(optimizer).__name__ == "SGD" and not optimizer.defaults.get("momentum")
    job = NewJob(
        rows=facts.rows,
        dense=JobDense(
            initial=capture(cache.streams, dense.model, new_optimizer(optimizer, dense.model)).get(),
            trainable=tuple(dense.parameters),
            optimizer=optimizer_name(facts.settings),
            keeps_state=not is_plain,
            has_averages=any(part.name == WeightAverage.name for part in parts),
        ),
        settings=facts.settings,
        world_size=facts.world_size,
        parts={
            part.name: {name: tensor for chunk in dense.chunks for name, tensor in part.tensors(chunk, 0).items()}
            for part in (dense, *parts)
            if part.name
        },
    )
    return FirstCheckpoint(settings.start_from, settings.start_without, job)


def _combined_progress(parts: tuple[Part, ...]) -> Mapping[str, Any]:
    """Counters summed over all ranks, for a job with another number of ranks."""
    return {
        **_common_progress(parts),
        "samples": sum(part.progress.get("samples", 0) for part in parts),
        "loss_sum": sum(part.progress.get("loss_sum", 0.0) for part in parts),
    }


def _common_progress(parts: tuple[Part, ...]) -> Mapping[str, Any]:
    """Counters that are equal on all ranks."""
    progress = parts[0].progress if parts else {}
    equal = ("skipped_batches", "loss_scale", "finite_steps", "plateau")
    return {name: progress[name] for name in equal if name in progress}
