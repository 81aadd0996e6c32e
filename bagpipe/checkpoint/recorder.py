"""`Recorder`: one rank's checkpoints during training. Lanes copy state before they change it; a thread writes files.

    compute  record_chunk(C)  copy of the dense part to the host ─────────────┐
    compute, push  after_update(C)  rows before the latest update, if kept ───┤
    compute, push  before_update(b)  copy-on-write snapshot at C; dirty rows ─┤ `PendingCheckpoint`
    copy     (RowCache.evict_in_epoch)  evicted rows, tagged with their epoch │
    net-out  before_write, after_write  logs closed; rows for the journal ────┴──> `CheckpointWriter` ──Part──> on_part
             after_delete  deleted rows, for the journal too
    caller   checkpoint(C), finish(N)  between two batches, at the end; no lane acts and all rows are written back

Lanes do not wait for the disk, with three exceptions: more than `BACKLOG_BYTES` of rows are queued, the dense parts of
the last two checkpoints are queued, or too many finished parts are unpublished for other ranks to be the cause. Lanes
never wait for a device: the writer thread waits for the copies. No checkpoint is skipped, so all ranks make the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bagpipe.checkpoint.recorded import NoRun, RecordedDense, RecordedRun, items_of
from bagpipe.checkpoint.writer import CheckpointPaths, CheckpointWriter, OnPart, PendingCheckpoint, SnapshotSink
from bagpipe.checkpoint.written_rows import WrittenRows
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.util.failpoints import hit

if TYPE_CHECKING:
    from bagpipe.cache.row_cache import RowCache
    from bagpipe.store.interface import Store

__all__ = ["BACKLOG_BYTES", "Recorder"]

#: Bytes of rows that can be queued for writing before lanes block.
BACKLOG_BYTES = 256 << 20
#: Bytes of snapshot rows copied per batch, if the drain then takes longer than `_DRAIN_BATCHES`.
_DRAIN_BYTES = 8 << 20
#: Minimum number of batches of a snapshot's drain; the maximum is half the checkpoint interval.
_DRAIN_BATCHES = 16
#: Maximum number of dense parts queued for writing.
_MAX_DENSE = 2
#: Write-backs between two inspections of the store's servers.
_INSPECT_EVERY = 50


class Recorder:
    """One rank's checkpoints. Enter it around training and evaluation; `start` binds it to one training run.

    Args:
        rank: this rank.
        every: checkpoint interval in batches: one before each batch whose number is a multiple. 0: only the last one.
        first_batch: first batch of this process; it gets no checkpoint.
        paths: folders of the files. None: no copies; checkpoints only close logs, which bounds them.
        on_part: called as ``on_part(step, epoch, part)`` with this rank's parts, in order, in the publisher thread,
            the last checkpoint included. Part is None without paths. While it blocks, `_max_parts` more checkpoints
            are made, then lanes wait. Its errors end the job.
        inspect: `Ledger.inspect`. Lane net-out calls it every 50 write-backs. Its errors end the job.
        cache, store, dense: the rows, where they are stored, the dense part.
        read_ahead: largest number of batches read and not yet trained.
        report: reports this rank's error to the other ranks. None: a job of one rank.

    Attributes:
        written: rows that this process has written, at least the latest.
        stall_s: time lanes spent in checkpoint work, without the last checkpoint.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        every: int = 0,
        first_batch: int = 0,
        paths: CheckpointPaths | None = None,
        on_part: OnPart,
        inspect: Callable[[], None] | None = None,
        cache: RowCache,
        store: Store,
        dense: RecordedDense,
        read_ahead: int,
        report: Callable[[BaseException], object] | None = None,
    ) -> None:
        self.written = WrittenRows()
        self.stall_s = 0.0
        self._every = every
        self._has_files = paths is not None
        self._on_part = on_part
        self._inspect = inspect
        self._cache = cache
        self._store = store
        self._dense = dense
        self._read_ahead = read_ahead
        self._report = report
        self._run: RecordedRun = NoRun()
        self._writer = CheckpointWriter(rank, paths, cache.schema, self._take_part, self._fail)
        self._lock = threading.RLock()
        self._dense_lock = threading.Lock()
        self._pending: dict[int, PendingCheckpoint] = {}  # by epoch
        self._snapshot_step = -1  # of the latest snapshot
        self._made_at_rest = first_batch  # step of the latest checkpoint that no lane has begun
        self._counters: Mapping[str, Any] = {}  # of the latest snapshot
        self._drain_slots = 0
        self._store_epoch = 1
        self._num_writes = 0

    def __enter__(self) -> Self:
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the threads. Discards unwritten work; after a successful `finish` there is none."""
        self._writer.close()

    def start(self, run: RecordedRun, check: Callable[[int], None]) -> None:
        """Bind to a training run.

        Args:
            run: the training run.
            check: the writer thread calls ``check(step)`` before it hands on a checkpoint. Raises after a bad batch.

        Raises:
            JobError: rows written before the first run could not be recorded.
        """
        error = self._run.first_error() if isinstance(self._run, NoRun) else None
        if error is not None:
            raise error
        self._run = run
        self._writer.check = check

    def due(self, b: int) -> bool:
        """Whether a checkpoint is made before batch b."""
        return self._every > 0 and b % self._every == 0 and b > self._made_at_rest

    # ---- lanes that compute --------------------------------------------------------------------------------------

    def record_chunk(self, b: int, chunk: str, counter: str) -> None:
        """Called in a chunk's lane after its step of the batch before b, before b changes its buffers or weights."""
        if self.due(b) and self._has_files:
            with self._stall():
                pending = self._begin(b)
                self._copy_chunk(pending, chunk)
                self._copy_loss(pending, counter)

    def after_update(self, b: int) -> None:
        """Called when all rows of the batch before b are updated, if a part keeps them as they were."""
        if self.due(b) and self._has_files:
            with self._stall():
                self._copy_rows(self._begin(b))

    def before_update(self, b: int, *, drains: bool = True) -> None:
        """Called before rows of batch b are updated, by every lane that updates rows; the first call begins a snapshot.

        Args:
            b: the batch.
            drains: whether this lane also copies some rows for the pending snapshot.
        """
        snapshot = self._cache.snapshot
        if self.due(b):
            with self._stall():
                self._begin_snapshot(b)
        if drains and snapshot.num_left and self._writer.backlog_bytes < BACKLOG_BYTES:
            with self._stall():
                snapshot.drain(self._drain_slots)
                self._after_drain()

    def _begin(self, step: int) -> PendingCheckpoint:
        """The pending checkpoint of a step. The first lane creates it, and waits while too many are pending."""
        pending = self._find(step)
        if pending is not None:
            return pending
        if self._has_files:
            writer, max_parts = self._writer, self._max_parts()
            self._wait_for(lambda: writer.num_dense < _MAX_DENSE and writer.num_parts < max_parts)
        with self._lock:
            pending = self._find(step)
            if pending is None:
                # Its snapshot begins later. Epochs end with checkpoints, in the same order.
                epoch = max([self._cache.snapshot.epoch - 1, *self._pending]) + 1
                missing = items_of(self._dense, self._run) if self._has_files else {"snapshot", "log"}
                pending = self._pending[epoch] = PendingCheckpoint(step=step, epoch=epoch, missing=missing)
                pending.progress["steps"] = step
                if self._has_files:
                    self._writer.admit()
            return pending

    def _max_parts(self) -> int:
        """Maximum number of finished, unpublished parts.

        A part waits for the parts of other ranks, and those for their lanes. Lanes close the log of a checkpoint at C
        when they evict for a batch read after C, at most `read_ahead` batches later, and finish its drain when the next
        checkpoint begins. Lanes that wait here must be further on than that, or the ranks deadlock.
        """
        return 2 + -(-(self._read_ahead + 2) // max(self._every, 1))

    def _find(self, step: int) -> PendingCheckpoint | None:
        with self._lock:
            return next((pending for pending in self._pending.values() if pending.step == step), None)

    def _copy_chunk(self, pending: PendingCheckpoint, name: str) -> None:
        from bagpipe.checkpoint.dense_state import random_state

        dense, cache = self._dense, self._cache
        with self._dense_lock:
            copied = pending.dense.get(name)
            if copied is not None:
                copied.tensors.order()  # another instance of the stage was first; order this lane after its copy
                return
            parts, pieces = self._run.tensors(name, pending.step), self._run.pieces(name)
            buffers = (f"model.{key}" for key, _ in dense.model.named_buffers(remove_duplicate=False))
            own = self._run.of_this_rank(parts)
            pending.unshared |= {*buffers, *own}
            rng = None if pending.dense else random_state(cache.device)
            copied = dense.capture(cache.streams, name, rng=rng, parts=parts)
            pending.dense[name] = replace(copied, is_divided=bool(own), pieces={**copied.pieces, **pieces})
            self._complete(pending, f"dense {name}")
            hit("after-dense-copy")

    def _copy_loss(self, pending: PendingCheckpoint, counter: str) -> None:
        from bagpipe.cache.staging import to_host

        # Cloned: lanes add to the sum in place, which on a CPU would change the in-flight copy.
        loss_sum = self._dense.loss_sums(pending.step)[counter].clone()
        pending.loss_sums[counter] = to_host(self._cache.streams, loss_sum)
        self._complete(pending, f"dense loss {counter}")

    def _copy_rows(self, pending: PendingCheckpoint) -> None:
        from bagpipe.checkpoint.dense_state import capture_parts

        if "dense rows" in pending.missing:
            pending.earlier_rows = capture_parts(self._cache.streams, self._run.row_tensors())
            self._complete(pending, "dense rows")

    def _begin_snapshot(self, step: int) -> None:
        cache = self._cache
        with cache.snapshot.lock:
            if self._snapshot_step == step:
                return  # another lane was first; the checkpoint can even be complete
            pending = self._begin(step)
            # Under the lock: the other lane is about to change the counters.
            self._counters = self._run.counters()
            pending.progress.update(self._counters)
            self.drain()
            num_bytes = cache.snapshot.begin(SnapshotSink(self._writer, pending) if self._has_files else None)
            self._snapshot_step = step
            batches = min(max(_DRAIN_BATCHES, num_bytes // _DRAIN_BYTES), self._every // 2)
            self._drain_slots = -(-len(cache.slots) // max(batches, 1))
        self._complete(pending, "snapshot")
        self._after_drain()

    def _after_drain(self) -> None:
        snapshot = self._cache.snapshot
        with self._lock:
            pending = self._pending.get(snapshot.epoch - 1)
            if pending is not None and "rows" in pending.missing and not snapshot.num_left:
                self._complete(pending, "rows")

    # ---- lane net-out --------------------------------------------------------------------------------------------

    def before_write(self, epoch: int) -> None:
        """Called in lane net-out before the write-back of rows evicted in an epoch. Raises as `Store.rotate`."""
        if self._store_epoch < epoch:
            with self._stall():
                while self._store_epoch < epoch:
                    self._close_logs()
        self._num_writes += 1
        if self._inspect is not None and self._num_writes % _INSPECT_EVERY == 0:
            self._inspect()

    def _close_logs(self) -> None:
        """Close the logs of an epoch in the store. All its write-backs are acknowledged."""
        num_groups = self._store.rotate()
        hit("after-rotation")
        with self._lock:
            pending = self._pending[self._store_epoch]
            pending.num_groups = tuple(num_groups.tolist())
            pending.sum_changes = self._store.sum_changes()
            self._store_epoch += 1
            self._complete(pending, "log")

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        """Called after the store has acknowledged rows that were evicted in an epoch for batch `step`."""
        for request in requests:
            self.written.add(request.table, request.ids)
        if requests and self._has_files:
            self._await_room()
            num_bytes = sum(request.rows.nbytes for request in requests)
            self._writer.rows(lambda: requests, num_bytes, epoch=epoch, step=step)

    def after_delete(self, requests: Sequence[DeleteRequest], epoch: int, step: int) -> None:
        """Called after `before_write` of the epoch and the store's deletion of rows that expire at batch `step`.

        All ranks' caches have released these rows in that epoch or before: no later snapshot or write-back has them.
        """
        if requests and self._has_files:
            self._await_room()
            self._writer.deletions(requests, epoch=epoch, step=step)

    # ---- no lane acts --------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Copy the remaining rows of the snapshot; called before all dirty rows are written."""
        snapshot = self._cache.snapshot
        while snapshot.num_left:
            self._await_room()
            snapshot.drain(max(self._drain_slots, 1))
            self._after_drain()

    def checkpoint(self, step: int, *, again: bool = False) -> None:
        """Make a checkpoint before batch `step`, between two batches; training goes on. No lane acts until it returns.

        All dirty rows are written before. All ranks call it at the same step. Returns on rank 0 when the checkpoint is
        published, on another rank when its part is durable. It takes the place of one that is due at this step, and,
        `again`, of one that was made at rest.

        Raises:
            JobError: a checkpoint could not be written.
            StoreError: as `before_write`.
        """
        if again and self._is_made(step):
            self._made_at_rest, self._snapshot_step = step - 1, -1
        with self._stall(restarts=True):
            self._make_at_rest(step)

    def finish(self, step: int) -> None:
        """As `checkpoint`, of the last batch; returns when all parts are published. It stalls no lane."""
        stall_s = self.stall_s
        self._make_at_rest(step)
        self.stall_s = stall_s

    def rest(self) -> None:
        """The run is left; its parts keep what checkpoints have."""
        self._run = self._run.at_rest()

    def has_changed(self, step: int) -> bool:
        """Whether counters have changed since the checkpoint of this step, which was made at rest."""
        return self._is_made(step) and self._run.counters() != self._counters

    def _is_made(self, step: int) -> bool:
        return self._has_files and step == self._made_at_rest == self._snapshot_step

    def _make_at_rest(self, step: int) -> None:
        """Complete all checkpoints, and make one if batches were trained since the latest."""
        self.drain()
        if step > self._made_at_rest:
            self._made_at_rest = step
            # Earlier checkpoints first: their parts need nothing more, so no rank waits for a rank that waits here.
            self.before_write(self._cache.snapshot.epoch)
            pending = self._begin(step)
            if self._has_files:
                # Copies that lanes have made can be in the file already; a second copy would replace them.
                missing = frozenset(pending.missing)
                for chunk in self._dense.chunks:
                    if f"dense {chunk}" in missing:
                        self._copy_chunk(pending, chunk)
                for counter in self._dense.loss_counters:
                    if f"dense loss {counter}" in missing:
                        self._copy_loss(pending, counter)
                self._copy_rows(pending)
            self._begin_snapshot(step)
            self.drain()
            self.before_write(self._cache.snapshot.epoch)
        self._wait_for(self._writer.is_idle)

    @contextmanager
    def _stall(self, *, restarts: bool = False) -> Iterator[None]:
        start_s, stall_s = time.monotonic(), self.stall_s
        yield
        with self._lock:
            self.stall_s = (stall_s if restarts else self.stall_s) + time.monotonic() - start_s

    def _complete(self, pending: PendingCheckpoint, item: str) -> None:
        """Mark an item as complete. The last dense item queues the dense part, the last item the checkpoint."""
        with self._lock:
            pending.missing.discard(item)
            if item.startswith("dense") and not any(missing.startswith("dense") for missing in pending.missing):
                self._writer.dense(pending)
            if not pending.missing:
                self._writer.complete(pending)

    def _await_room(self) -> None:
        self._wait_for(lambda: self._writer.backlog_bytes < BACKLOG_BYTES)

    def _wait_for(self, test: Callable[[], bool]) -> None:
        self._writer.wait_for(test, self._run.first_error)

    def _take_part(self, step: int, epoch: int, part: Any) -> None:
        self._on_part(step, epoch, part)
        with self._lock:
            del self._pending[epoch]

    def _fail(self, error: BaseException) -> None:
        self._run.abort(error)
        if self._report is not None:
            # Report now: lanes of this rank can wait for other ranks that wait for lanes that ended here.
            self._report(error)
