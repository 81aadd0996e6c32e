"""`Recorder`: one rank's checkpoints, made while it trains. Lanes copy what they are about to change; a thread writes.

    compute  before_forward(C)  the dense part, on its way to the host ───────┐
    compute, push  before_update(b)  the snapshot of C; rows that are dirty ──┤ `PendingCheckpoint`
    copy     (RowCache.evict_in_epoch)  rows that leave, told their epoch     │
    net-out  before_write, after_write  logs closed; rows for the journal ────┴──> `CheckpointWriter` ──Part──> on_part
    main     finish(N)  the last checkpoint, when everything is written back

Rule of this file: *no lane waits for the disk*, unless more than `BACKLOG_BYTES` wait to be written, the dense parts of
the two checkpoints before, or so many finished parts that other ranks cannot be what they wait for; *nor for a device*:
copies come when they come, and the scribe waits for them. A checkpoint is never skipped: all ranks make the same ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from bagpipe.checkpoint.writer import CheckpointPaths, CheckpointWriter, OnPart, PendingCheckpoint, SnapshotSink
from bagpipe.checkpoint.written_rows import WrittenRows
from bagpipe.store.interface import WriteRequest
from bagpipe.util.failpoints import hit

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from bagpipe.cache.staging import PendingTensor
    from bagpipe.training.engine import Engine

__all__ = ["BACKLOG_BYTES", "NoRecorder", "Recorder"]

#: Bytes of rows that may wait to be written before lanes wait too.
BACKLOG_BYTES = 256 << 20

#: Bytes of rows copied per batch, if that takes longer than `_DRAIN_BATCHES`.
_DRAIN_BYTES = 8 << 20
#: Batches over which the copying of a checkpoint's rows is spread at least; half of those until the next at most.
_DRAIN_BATCHES = 16

#: Dense parts that wait to be written, at most.
_MAX_DENSE = 2

#: Write-backs between two looks at the store's servers.
_INSPECT_EVERY = 50


class NoRecorder:
    """In the place of a recorder where there is none."""

    stall_s = 0.0

    def watch(self, check: Callable[[int], None]) -> None:
        """Training begins. Before a checkpoint leaves, a thread calls ``check(step)``: it raises if a batch was bad."""

    def before_forward(self, b: int, loss_sum: Tensor) -> None:
        """Batch b is about to be computed by the whole model; `loss_sum` is that of the batches before."""

    def before_instance(self, stage: int, instance: int, b: int, loss_sum: Tensor) -> None:
        """A stage instance is about to begin batch b, in its lane; `loss_sum` is its own of the batches before."""

    def before_update(self, b: int, counts: Callable[[], Mapping[str, Any]], *, drains: bool = True) -> None:
        """Rows of batch b are about to be updated, by whichever of the lanes that do so is first.

        Args:
            b: the batch.
            counts: of the batches before, for `Part.progress`.
            drains: the lane is to copy some more rows for a checkpoint that is being made.
        """

    def before_write(self, epoch: int) -> None:
        """Rows that left the cache in an epoch are about to be written, in lane net-out.

        Raises:
            StoreError: a log could not be closed, or a server is not what it was.
        """

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        """The store has acknowledged rows that left the cache in an epoch, for a batch."""

    def drain(self) -> None:
        """Training is over, rows are about to be flushed: copy what is left to copy."""

    def finish(
        self,
        step: int,
        counts: Callable[[], Mapping[str, Any]],
        loss_sum: Tensor,
        instance_sums: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        """All rows are written back: make the last checkpoint, return when `on_part` has had it and all before.

        Raises:
            JobError: a checkpoint could not be written. StoreError: as `before_write`.
        """


class Recorder(NoRecorder):
    """One rank's. Give it to one `Engine`, and enter it around that engine's training and evaluation.

    Args:
        rank: this one.
        every: a checkpoint before each batch whose number is a multiple of this; 0: only the last one, at the end.
        first_batch: of this process; no checkpoint is made of it.
        places: where files go. None: nothing is copied, checkpoints only close logs, so that these stay bounded.
        on_part: takes what this rank contributes: ``on_part(step, epoch, part)``, in order, in the recorder's thread;
            the last checkpoint too. Part is None without places. While it blocks, some more checkpoints are made
            (`_max_parts`), then lanes wait. Its errors end the job.
        inspect: looks at the store's servers (`Ledger.inspect`); called in lane net-out every 50 write-backs. Its
            errors end the job.

    Attributes:
        written: rows that this process has written, the latest ones at least.
        stall_s: what it has cost the lanes so far, the last checkpoint left out.

    `Part.progress` has ``steps``, ``samples``, ``skipped_batches``, ``reader_state``, ``loss_sum``,
    `LossScale.carried`; with stages ``loss_sums`` by instance; and ``dense``: digests of parameters and optimizer state
    by stage (or ``model``), equal on ranks that hold the same. Buffers are each rank's own.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        every: int = 0,
        first_batch: int = 0,
        places: CheckpointPaths | None = None,
        on_part: OnPart,
        inspect: Callable[[], None] | None = None,
    ) -> None:
        self.written = WrittenRows()
        self.stall_s = 0.0
        self._every = every
        self._first_batch = first_batch
        self._has_files = places is not None
        self._on_part = on_part
        self._inspect = inspect
        self._engine: Engine | None = None
        self._scribe = CheckpointWriter(rank, places, self._take_part, self._fail)
        self._lock = threading.RLock()
        self._dense_lock = threading.Lock()
        self._makings: dict[int, PendingCheckpoint] = {}  # by epoch
        self._snapshot_step = -1  # of the latest snapshot
        self._drain_slots = 0
        self._store_epoch = 1
        self._num_writes = 0

    def bind(self, engine: Engine) -> None:
        """By the engine: whose training is recorded."""
        self._engine = engine
        self._scribe.schema = engine.cache.schema

    def __enter__(self) -> Self:
        self._scribe.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. What is not written by then is given up; `finish` has waited for it if all went well."""
        self._scribe.close()

    def watch(self, check: Callable[[int], None]) -> None:
        self._scribe.check = check

    def due(self, b: int) -> bool:
        """Whether a checkpoint is made before batch b."""
        return self._every > 0 and b % self._every == 0 and b > self._first_batch

    # ---- lanes that compute --------------------------------------------------------------------------------------

    def before_forward(self, b: int, loss_sum: Tensor) -> None:
        if self.due(b) and self._has_files:
            with self._stall():
                self._copy_model(self._begin(b), loss_sum)

    def before_instance(self, stage: int, instance: int, b: int, loss_sum: Tensor) -> None:
        if self.due(b) and self._has_files:
            with self._stall():
                making = self._begin(b)
                self._copy_stage(making, stage)
                self._note_loss(making, instance, loss_sum)

    def before_update(self, b: int, counts: Callable[[], Mapping[str, Any]], *, drains: bool = True) -> None:
        snapshot = self._bound.cache.snapshot
        if self.due(b):
            with self._stall():
                self._begin_snapshot(b, counts)
        if drains and snapshot.num_left and self._scribe.backlog_bytes < BACKLOG_BYTES:
            with self._stall():
                snapshot.drain(self._drain_slots)
                self._after_drain()

    def _begin(self, step: int) -> PendingCheckpoint:
        """The checkpoint of a step, made by the first lane that comes to it; waits while too many are under way."""
        making = self._at(step)
        if making is not None:
            return making
        if self._has_files:
            scribe, max_parts = self._scribe, self._max_parts()
            self._wait_for(lambda: scribe.num_dense < _MAX_DENSE and scribe.num_parts < max_parts)
        with self._lock:
            making = self._at(step)
            if making is None:
                # Its snapshot begins later; the epochs that end with checkpoints are in the order of checkpoints.
                epoch = max([self._bound.cache.snapshot.epoch - 1, *self._makings]) + 1
                making = self._makings[epoch] = PendingCheckpoint(step=step, epoch=epoch, missing=self._pieces())
                making.progress["steps"] = step
                if self._has_files:
                    self._scribe.admit()
            return making

    def _max_parts(self) -> int:
        """Finished parts that may wait to be published.

        One waits for another rank's, and that for the rank's lanes: they close the log of a checkpoint at C once they
        evict for a batch that is read after C, `read_ahead` batches later at most, and have drained its rows when the
        next one begins. So lanes that wait here must be further on than that, or the ranks wait for each other.
        """
        return 2 + -(-(self._bound.settings.read_ahead + 2) // max(self._every, 1))

    def _pieces(self) -> set[str]:
        if not self._has_files:
            return {"snapshot", "log"}
        pipeline = self._bound.pipeline
        if pipeline is None:
            return {"snapshot", "log", "rows", "dense model"}
        dense = {f"dense {stage}" for stage in pipeline.stages} | {f"dense loss {n}" for n in pipeline.instances}
        return {"snapshot", "log", "rows", *dense}

    def _at(self, step: int) -> PendingCheckpoint | None:
        with self._lock:
            return next((making for making in self._makings.values() if making.step == step), None)

    def _copy_model(self, making: PendingCheckpoint, loss_sum: Tensor) -> None:
        making.loss_sum = self._sent(loss_sum)
        self._copy_dense(making, "model", [self._bound.optimizer])

    def _copy_stage(self, making: PendingCheckpoint, stage: int) -> None:
        pipeline = self._bound.pipeline
        assert pipeline is not None, "stages have a pipeline"
        with self._dense_lock:
            copied = making.dense.get(str(stage))
            if copied is not None:
                copied.tensors.order()  # another instance of the stage was first: this one begins when it is copied
                return
            optimizer = pipeline.optimizers.get(stage)
            self._copy_dense(making, str(stage), [optimizer] if optimizer else [], pipeline.names_of(stage))

    def _copy_dense(
        self, making: PendingCheckpoint, name: str, optimizers: Sequence[Optimizer], only: Collection[str] | None = None
    ) -> None:
        from bagpipe.checkpoint.dense_state import capture, random_state

        engine = self._bound
        making.unshared = frozenset(f"model.{key}" for key, _ in engine.model.named_buffers(remove_duplicate=False))
        rng = None if making.dense else random_state(engine.cache.device)
        making.dense[name] = capture(engine.cache.streams, engine.model, *optimizers, only=only, rng=rng)
        self._give(making, f"dense {name}")
        hit("after-dense-copy")

    def _note_loss(self, making: PendingCheckpoint, instance: int, loss_sum: Tensor) -> None:
        making.instance_sums[instance] = self._sent(loss_sum)
        self._give(making, f"dense loss {instance}")

    def _sent(self, loss_sum: Tensor) -> PendingTensor:
        from bagpipe.cache.staging import to_host

        # A copy: lanes add to the sum in place, which on a CPU would change what is on its way.
        return to_host(self._bound.cache.streams, loss_sum.clone())

    def _begin_snapshot(self, step: int, counts: Callable[[], Mapping[str, Any]]) -> None:
        cache = self._bound.cache
        with cache.snapshot.lock:
            if self._snapshot_step == step:
                return  # the other lane that updates rows was first; the checkpoint may be done by now
            making = self._begin(step)
            # While the other lane waits: it is about to change what is counted.
            making.progress.update(counts())
            self.drain()
            num_bytes = cache.snapshot.begin(SnapshotSink(self._scribe, making) if self._has_files else None)
            self._snapshot_step = step
            batches = min(max(_DRAIN_BATCHES, num_bytes // _DRAIN_BYTES), self._every // 2)
            self._drain_slots = -(-len(cache.slots) // max(batches, 1))
        self._give(making, "snapshot")
        self._after_drain()

    def _after_drain(self) -> None:
        snapshot = self._bound.cache.snapshot
        with self._lock:
            making = self._makings.get(snapshot.epoch - 1)
            if making is not None and "rows" in making.missing and not snapshot.num_left:
                self._give(making, "rows")

    # ---- lane net-out --------------------------------------------------------------------------------------------

    def before_write(self, epoch: int) -> None:
        if self._store_epoch < epoch:
            with self._stall():
                while self._store_epoch < epoch:
                    self._close_logs()
        self._num_writes += 1
        if self._inspect is not None and self._num_writes % _INSPECT_EVERY == 0:
            self._inspect()

    def _close_logs(self) -> None:
        """End an epoch in the store: every write-back of it has been acknowledged."""
        num_groups = self._bound.store.rotate()
        hit("after-rotation")
        with self._lock:
            making = self._makings[self._store_epoch]
            making.num_groups = tuple(num_groups.tolist())
            self._store_epoch += 1
            self._give(making, "log")

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        if not requests:
            return
        for request in requests:
            self.written.add(request.table, request.ids)
        if self._has_files:
            self._wait_for(lambda: self._scribe.backlog_bytes < BACKLOG_BYTES)
            num_bytes = sum(request.rows.nbytes for request in requests)
            self._scribe.rows(lambda: requests, num_bytes, epoch=epoch, step=step)

    # ---- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        snapshot = self._bound.cache.snapshot
        while snapshot.num_left:
            self._wait_for(lambda: self._scribe.backlog_bytes < BACKLOG_BYTES)
            snapshot.drain(max(self._drain_slots, 1))
            self._after_drain()

    def finish(
        self,
        step: int,
        counts: Callable[[], Mapping[str, Any]],
        loss_sum: Tensor,
        instance_sums: Mapping[int, Tensor] = MappingProxyType({}),
    ) -> None:
        stall_s = self.stall_s
        if step > self._first_batch:
            making = self._begin(step)
            pipeline = self._bound.pipeline
            if self._has_files and pipeline is None:
                self._copy_model(making, loss_sum)
            elif self._has_files and pipeline is not None:
                for stage in pipeline.stages:
                    self._copy_stage(making, stage)
                for instance, own_sum in instance_sums.items():
                    self._note_loss(making, instance, own_sum)
            self._begin_snapshot(step, counts)
            self.drain()
            self.before_write(self._bound.cache.snapshot.epoch)
        self._wait_for(self._scribe.is_idle)
        self.stall_s = stall_s

    # ---- helpers -------------------------------------------------------------------------------------------------

    @property
    def _bound(self) -> Engine:
        assert self._engine is not None, "bound by its engine"
        return self._engine

    @contextmanager
    def _stall(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        with self._lock:
            self.stall_s += time.monotonic() - start_s

    def _give(self, making: PendingCheckpoint, piece: str) -> None:
        """A lane has done its part; the last of the dense part, and the last of all, send it off."""
        with self._lock:
            making.missing.discard(piece)
            if piece.startswith("dense") and not any(missing.startswith("dense") for missing in making.missing):
                self._scribe.dense(making)
            if not making.missing:
                self._scribe.complete(making)

    def _wait_for(self, test: Callable[[], bool]) -> None:
        runner = self._bound.runner
        self._scribe.wait_for(test, lambda: runner.lost() if runner is not None else None)

    def _take_part(self, step: int, epoch: int, part: Any) -> None:
        self._on_part(step, epoch, part)
        with self._lock:
            del self._makings[epoch]

    def _fail(self, error: BaseException) -> None:
        engine = self._bound
        engine.abort(error)
        if engine.peers is not None:
            # At once: lanes of this rank may be waiting for others that wait for those that have ended here.
            engine.peers.report(error)
