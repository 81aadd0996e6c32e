"""`Checkpoints`: a job's checkpoints and fence on one rank: what it resumes, records, publishes and invalidates.

    begin ──> Beginning ──restore──> model, optimizer, random state      before the first batch
              claim: every rank has its first batch ──> rank 0 recovers the store's rows ──> every rank writes fenced
    Recorder ──Part──> Publisher ──> folder, store                       while training
    an error that says that rows are not to be trusted ──> invalidate       at the end

A job without `checkpoint.dir` is fenced too, and closes its logs now and then so that they stay bounded.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.dense_state import check_model, combine, load, restore_random_state
from bagpipe.checkpoint.folder import CheckpointFolder
from bagpipe.checkpoint.manifest import BrokenCheckpoint, Manifest, Part
from bagpipe.checkpoint.publisher import Publisher
from bagpipe.checkpoint.reader import CheckpointRows
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.checkpoint.recovery import Recovered, check_namespace, recover, take_over
from bagpipe.checkpoint.writer import CheckpointPaths
from bagpipe.config.sections import Config
from bagpipe.errors import CorruptRowError, FencedError, InputError, LostRowError, StoreError
from bagpipe.store.fencing.fence import Fence, Ledger, invalidated
from bagpipe.store.interface import Store
from bagpipe.training.dense import DensePart
from bagpipe.training.engine import WrittenRows
from bagpipe.training.part import LoopPart
from trainer.beginning import Beginning, JobFacts, begin, note, place_of
from trainer.ranks import Ranks

__all__ = ["Checkpoints"]

#: Batches between two closings of the logs of a job without checkpoints: 12 B for each row written in between.
_CLOSE_EVERY = 1_000

#: A reload that takes longer says how far it is, so often.
_SAY_EVERY_S = 5.0


class Checkpoints:
    """One rank's. Context manager: leaving it drops unpublished checkpoints, and invalidates the rows after an error.

    Args:
        config: the job.
        ranks: its ranks.
        facts: what the checkpoints are compared with.
        store: open.
        cache: the rows.
        dense: the dense part; its models are equal on all ranks.
        parts: further parts of the training loop that keep tensors.

    Attributes:
        beginning: where the job begins.
        recorder: for the engine.

    Raises:
        InputError, StoreError: see `trainer.beginning.begin`.
    """

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        facts: JobFacts,
        store: Store,
        *,
        cache: RowCache,
        dense: DensePart,
        parts: Sequence[LoopPart] = (),
    ) -> None:
        self._config = config
        self._ranks = ranks
        self._facts = facts
        self._store = store
        self._stack = ExitStack()
        self.beginning: Beginning = begin(config, ranks, facts, store)
        self._rows: CheckpointRows | None = None
        checkpoint = self.beginning.checkpoint
        if checkpoint is not None:
            try:
                self._rows = CheckpointRows(checkpoint.folder, checkpoint.manifest, facts.rows)
            except BrokenCheckpoint as error:
                raise InputError(str(error)) from None
        self._publisher: Publisher | None = None
        #: Rank 0's: the one who recovers and commits. Entered when the namespace is claimed.
        self._ledger: Ledger = store.ledger()
        self._watch: Ledger | None = None
        self._has_claimed = False
        self._is_suspect = False
        self._dense = dense
        self._parts = tuple(parts)
        self._device = cache.device
        self.recorder = self._make_recorder(cache)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.recorder)
        self._restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._publisher is not None:
            self._publisher.close()
        is_suspect = self._is_suspect or isinstance(error, (LostRowError, CorruptRowError))
        if is_suspect and self._has_claimed and self.beginning.checkpoint_id:
            with suppress(StoreError), self._store.ledger() as ledger:
                ledger.invalidate(invalidated(self.beginning.checkpoint_id))
        self._stack.close()

    @property
    def first_batch(self) -> int:
        return self.beginning.first_batch

    @property
    def resumed_from(self) -> int | None:
        """Step of the checkpoint that was loaded; None if everything was initial."""
        return self.first_batch if self.beginning.parts else None

    @property
    def num_published(self) -> int:
        """Checkpoints written by this process."""
        return self._publisher.num_published if self._publisher is not None else 0

    @property
    def reader_state(self) -> Mapping[str, Any] | None:
        """Position of the data reader before the first batch; None: at the beginning."""
        checkpoint = self.beginning.checkpoint
        return checkpoint.manifest.reader_state if checkpoint is not None else None

    def _make_recorder(self, cache: RowCache) -> Recorder:
        checkpoint, rank, peers = self.beginning.checkpoint, self._ranks.rank, self._ranks.peers
        places = None
        every, on_part = _CLOSE_EVERY, self._close_logs
        if checkpoint is not None:
            folder, generation = self.beginning.folder, self.beginning.generation
            assert folder is not None, "there is a checkpoint"
            check_model(self._dense.model)
            self._publisher = self._make_publisher(folder, checkpoint.manifest.lineage)
            every, on_part = self._config.checkpoint.every, self._publish
            places = CheckpointPaths(
                generation=folder.generation_folder(generation),
                step=lambda step: folder.step_folder(generation, step),
            )
        return Recorder(
            rank=rank,
            every=every,
            first_batch=self.first_batch,
            places=places,
            on_part=on_part,
            inspect=self._inspect,
            cache=cache,
            store=self._store,
            dense=self._dense,
            read_ahead=self._config.cache.read_ahead,
            report=peers.report if peers is not None else None,
        )

    @property
    def known(self) -> WrittenRows | None:
        """Which rows the checkpoint has, and the store must therefore have; None: everything is initial."""
        return self._knows if self.beginning.parts else None

    def _restore(self) -> None:
        """Load the dense part, and what other parts keep.

        Raises:
            InputError: it is of another model, or cannot be read.
        """
        checkpoint, dense = self.beginning.checkpoint, self._dense
        if checkpoint is None or not self.beginning.parts:
            return
        rank = self._ranks.rank
        has_own = rank < len(self.beginning.parts)
        parts = list(self.beginning.parts)
        # Where nothing was cut into stages each part is whole, and buffers may be each rank's own.
        parts = [parts.pop(rank if has_own else 0), *(parts if dense.is_staged else ())]
        try:
            state = combine(load(checkpoint.folder, part.dense) for part in parts)
        except BrokenCheckpoint as error:
            raise InputError(str(error)) from None
        state.restore(dense.model, *(piece.optimizer for piece in dense.pieces.values() if piece.optimizer is not None))
        for part in self._parts:
            part.load_tensors(state.of_part(part.name))
        if has_own:
            restore_random_state(state.rng(), self._device)

    def carried(self) -> Mapping[str, Any]:
        """What this rank goes on counting from."""
        parts = self.beginning.parts
        if len(parts) == self._ranks.world_size:
            return parts[self._ranks.rank].progress
        return _all_progress(parts) if self._ranks.is_first else _no_progress(parts)

    # ---- the store -----------------------------------------------------------------------------------------------

    def _knows(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the checkpoint has each row."""
        assert self._rows is not None, "there is a checkpoint"
        return self._rows.contains(table, ids)

    def claim(self) -> bool:
        """By all ranks: the namespace becomes this job's, its rows those of the beginning. True if there are none."""
        ranks = self._ranks
        ranks.gather(None)
        is_new = bool(ranks.share(self._recover() if ranks.is_first else None))
        self._store.fence(Fence(token=self.beginning.token, writer=ranks.rank, epoch=1))
        self._watch = self._stack.enter_context(self._store.ledger())
        self._has_claimed = True
        return is_new

    def claim_if_resumed(self) -> None:
        """By all ranks, after training: a job that had nothing left to train has its rows all the same."""
        if self.beginning.parts and not self._has_claimed:
            self.claim()

    def _recover(self) -> bool:
        beginning, rows = self.beginning, self._rows
        ledger = self._stack.enter_context(self._ledger)
        states, place = ledger.state(), place_of(self._config)
        checkpoint = beginning.checkpoint
        check_namespace(states, place, "" if checkpoint is None else checkpoint.manifest.lineage)
        self._store.claim(reloads=checkpoint is not None)
        if checkpoint is None or rows is None:
            return take_over(ledger, token=beginning.token, num_writers=self._ranks.world_size, place=place)
        done = recover(
            self._store,
            ledger,
            token=beginning.token,
            checkpoint=checkpoint.manifest,
            rows=rows,
            num_writers=self._ranks.world_size,
            place=place,
            progress=_Reloading(rows.num_records),
        )
        _say(done, len(states))
        return not rows.num_records

    def _inspect(self) -> None:
        assert self._watch is not None, "claimed before anything is written"
        try:
            self._watch.inspect()
        except FencedError:
            raise
        except StoreError:
            self._is_suspect = True
            raise

    def check_rows(self) -> None:
        """By rank 0, after training: what it looks for is a row that was lost after it was needed for the last time.

        Raises:
            LostRowError: a row of the last checkpoint is not in the store.
            StoreError: a server is not what it was, or the namespace is another job's by now.
        """
        if self._has_claimed:  # the last look may have been many write-backs ago
            self._inspect()
        if self._publisher is None:
            return
        newest = self._publisher.newest
        rows = CheckpointRows(newest.folder, newest.manifest, self._facts.rows)
        for number, table in enumerate(self._store.schema.tables):
            missing = np.setdiff1d(rows.ids(number), self._store.ids(number), assume_unique=True)
            if len(missing):
                raise LostRowError(
                    f"table {table.name} id {missing[0]} was written, but is not in the store any more "
                    f"({len(missing)} such rows at the end)"
                )

    # ---- publishing ----------------------------------------------------------------------------------------------

    def _make_publisher(self, folder: CheckpointFolder, lineage: str) -> Publisher:
        facts, checkpoint = self._facts, self.beginning.checkpoint
        assert checkpoint is not None, "there is a folder"
        template = Manifest(
            lineage=lineage,
            generation=self.beginning.generation,
            step=0,
            parent_checkpoint_id="",
            token=self.beginning.token,
            epoch=0,
            world_size=facts.world_size,
            settings=facts.settings,
            row_schema=facts.row_schema,
            identity=facts.identity,
        )
        return Publisher(
            folder,
            checkpoint,
            template,
            facts.rows,
            rank=self._ranks.rank,
            ledger=self._ledger,
            keep=self._config.checkpoint.keep,
            full_every=self._config.checkpoint.full_every,
            timeout_s=self._config.run.peer_timeout_s,
        )

    def _publish(self, step: int, epoch: int, part: Part | None) -> None:
        assert self._publisher is not None, "there is a folder"
        assert part is not None, "there is a folder"
        self._publisher(step, epoch, part)

    def _close_logs(self, step: int, epoch: int, part: Part | None) -> None:
        """Forget old logs. Another rank may still have to close that of the epoch before, if this is the job's last."""
        if self._ranks.is_first and epoch > 2:
            self._ledger.commit("", epoch - 2)


class _Reloading:
    """Says now and then how far a long reload is."""

    def __init__(self, num_records: int) -> None:
        self._num_records = num_records
        self._start_s = self._said_s = time.monotonic()

    def __call__(self, num_rows: int, num_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = now_s
            rate = num_bytes / (now_s - self._start_s) / 1e6
            note(f"{num_rows} of at most {self._num_records} rows loaded into the store, {rate:.0f} MB/s")


def _say(done: Recovered, num_buckets: int) -> None:
    if done.buckets_reloaded:
        note(
            f"{done.buckets_reloaded} of the store's {num_buckets} buckets were loaded from the checkpoint's files: "
            f"{done.rows_written} rows, {done.bytes_written / 1e6:.0f} MB in {done.seconds:.1f} s"
        )


def _all_progress(parts: tuple[Part, ...]) -> Mapping[str, Any]:
    """Of all ranks together, for one of another number of ranks."""
    return {
        **_no_progress(parts),
        "samples": sum(part.progress.get("samples", 0) for part in parts),
        "loss_sum": sum(part.progress.get("loss_sum", 0.0) for part in parts),
    }


def _no_progress(parts: tuple[Part, ...]) -> Mapping[str, Any]:
    """What all ranks count alike."""
    progress = parts[0].progress if parts else {}
    return {name: progress[name] for name in ("skipped_batches", "loss_scale", "finite_steps") if name in progress}
