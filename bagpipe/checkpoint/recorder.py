"""`Recorder`: one rank's checkpoints, made while it trains. Lanes copy what they are about to change; a thread writes.

    compute  before_forward(C)  the dense part, on its way to the host ───────┐
    compute, push  before_update(b)  the snapshot of C; rows that are dirty ──┤ `PendingCheckpoint`
    copy     (RowCache.evict_in_epoch)  rows that leave, told their epoch     │
    net-out  before_write, after_write  logs closed; rows for the journal ────┴──> `CheckpointWriter` ──Part──> on_part
    main     finish(N)  the last checkpoint, when everything is written back

Rule of this file: *no lane waits for the disk*, unless more than `BACKLOG_BYTES` wait to be written, the dense parts of
the two checkpoints before, or so many finished parts that other ranks cannot be what they wait for; *nor for a device*:
copies come when they come, and the writer waits for them. A checkpoint is never skipped: all ranks make the same ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bagpipe.checkpoint.recorded import RecordedDense, RecordedRun
from bagpipe.checkpoint.writer import CheckpointPaths, CheckpointWriter, OnPart, PendingCheckpoint, SnapshotSink
from bagpipe.checkpoint.written_rows import WrittenRows
from bagpipe.store.interface import WriteRequest
from bagpipe.util.failpoints import hit

if TYPE_CHECKING:
    from bagpipe.cache.row_cache import RowCache
    from bagpipe.store.interface import Store

__all__ = ["BACKLOG_BYTES", "Recorder"]

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


class Recorder:
    """One rank's checkpoints. Enter it around training and evaluation; `start` binds it to one training run.

    Args:
        rank: this one.
        every: a checkpoint before each batch whose number is a multiple of this; 0: only the last one, at the end.
        first_batch: of this process; no checkpoint is made of it.
        paths: where files go. None: nothing is copied, checkpoints only close logs, so that these stay bounded.
        on_part: takes what this rank contributes: ``on_part(step, epoch, part)``, in order, in the recorder's thread;
            the last checkpoint too. Part is None without paths. While it blocks, some more checkpoints are made
            (`_max_parts`), then lanes wait. Its errors end the job.
        inspect: looks at the store's servers (`Ledger.inspect`); called in lane net-out every 50 write-backs. Its
            errors end the job.
        cache: the rows.
        store: open.
        dense: the dense part.
        read_ahead: batches read and not yet trained, at most.
        report: tells other ranks that this one ends with an error; None: there are none.

    Attributes:
        written: rows that this process has written, the latest ones at least.
        stall_s: what it has cost the lanes so far, the last checkpoint left out.

    `Part.progress` has ``steps``, the counters of all parts of the loop (samples, skipped batches, the reader's state,
    the loss scale), ``loss_sum`` and ``loss_sums`` by counter; and ``dense``: digests of parameters and optimizer state
    by piece, equal on ranks that hold the same. Buffers are left out, as each rank has its own while it trains.
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
        self._first_batch = first_batch
        self._has_files = paths is not None
        self._on_part = on_part
        self._inspect = inspect
        self._cache = cache
        self._store = store
        self._dense = dense
        self._read_ahead = read_ahead
        self._report = report
        self._run: RecordedRun
        self._writer = CheckpointWriter(rank, paths, cache.schema, self._take_part, self._fail)
        self._lock = threading.RLock()
        self._dense_lock = threading.Lock()
        self._pending: dict[int, PendingCheckpoint] = {}  # by epoch
        self._snapshot_step = -1  # of the latest snapshot
        self._drain_slots = 0
        self._store_epoch = 1
        self._num_writes = 0

    def __enter__(self) -> Self:
        self._writer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread. What is not written by then is given up; `finish` has waited for it if all went well."""
        self._writer.close()

    def start(self, run: RecordedRun, check: Callable[[int], None]) -> None:
        """Training begins.

        Args:
            run: the training.
            check: before a checkpoint leaves, a thread calls ``check(step)``: it raises if a batch before was bad.
        """
        self._run = run
        self._writer.check = check

    def due(self, b: int) -> bool:
        """Whether a checkpoint is made before batch b."""
        return self._every > 0 and b % self._every == 0 and b > self._first_batch

    # ---- lanes that compute --------------------------------------------------------------------------------------

    def before_forward(self, b: int, piece: str, counter: str) -> None:
        """Batch b is about to change buffers of a piece, and a sum of losses, in their lane."""
        if self.due(b) and self._has_files:
            with self._stall():
                pending = self._begin(b)
                self._copy_piece(pending, piece)
                self._copy_loss(pending, counter)

    def before_update(self, b: int, *, drains: bool = True) -> None:
        """Rows of batch b are about to be updated, by whichever of the lanes that do so is first.

        Args:
            b: the batch.
            drains: the lane copies some more rows for a checkpoint that is being made.
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
        """The checkpoint of a step, made by the first lane that comes to it; waits while too many are under way."""
        pending = self._find(step)
        if pending is not None:
            return pending
        if self._has_files:
            writer, max_parts = self._writer, self._max_parts()
            self._wait_for(lambda: writer.num_dense < _MAX_DENSE and writer.num_parts < max_parts)
        with self._lock:
            pending = self._find(step)
            if pending is None:
                # Its snapshot begins later; the epochs that end with checkpoints are in the order of checkpoints.
                epoch = max([self._cache.snapshot.epoch - 1, *self._pending]) + 1
                pending = self._pending[epoch] = PendingCheckpoint(step=step, epoch=epoch, missing=self._pieces())
                pending.progress["steps"] = step
                if self._has_files:
                    self._writer.admit()
            return pending

    def _max_parts(self) -> int:
        """Finished parts that may wait to be published.

        One waits for another rank's, and that for the rank's lanes: they close the log of a checkpoint at C once they
        evict for a batch that is read after C, `read_ahead` batches later at most, and have drained its rows when the
        next one begins. So lanes that wait here must be further on than that, or the ranks wait for each other.
        """
        return 2 + -(-(self._read_ahead + 2) // max(self._every, 1))

    def _pieces(self) -> set[str]:
        if not self._has_files:
            return {"snapshot", "log"}
        copies = {f"dense {piece}" for piece in self._dense.pieces}
        return {"snapshot", "log", "rows", *copies, *(f"dense loss {name}" for name in self._dense.loss_counters)}

    def _find(self, step: int) -> PendingCheckpoint | None:
        with self._lock:
            return next((pending for pending in self._pending.values() if pending.step == step), None)

    def _copy_piece(self, pending: PendingCheckpoint, name: str) -> None:
        from bagpipe.checkpoint.dense_state import capture, random_state

        dense, cache = self._dense, self._cache
        with self._dense_lock:
            copied = pending.dense.get(name)
            if copied is not None:
                copied.tensors.order()  # another instance of the stage was first: this one begins when it is copied
                return
            piece = dense.pieces[name]
            pending.unshared = frozenset(f"model.{key}" for key, _ in dense.model.named_buffers(remove_duplicate=False))
            pending.dense[name] = capture(
                cache.streams,
                dense.model,
                *(() if piece.optimizer is None else (piece.optimizer,)),
                only=piece.tensors,
                rng=None if pending.dense else random_state(cache.device),
                parts=self._run.tensors(name),
            )
            self._complete_piece(pending, f"dense {name}")
            hit("after-dense-copy")

    def _copy_loss(self, pending: PendingCheckpoint, counter: str) -> None:
        from bagpipe.cache.staging import to_host

        # A copy: lanes add to the sum in place, which on a CPU would change what is on its way.
        loss_sum = self._dense.loss_sums()[counter].clone()
        pending.loss_sums[counter] = to_host(self._cache.streams, loss_sum)
        self._complete_piece(pending, f"dense loss {counter}")

    def _begin_snapshot(self, step: int) -> None:
        cache = self._cache
        with cache.snapshot.lock:
            if self._snapshot_step == step:
                return  # the other lane that updates rows was first; the checkpoint may be done by now
            pending = self._begin(step)
            # While the other lane waits: it is about to change what is counted.
            pending.progress.update(self._run.counters())
            self.drain()
            num_bytes = cache.snapshot.begin(SnapshotSink(self._writer, pending) if self._has_files else None)
            self._snapshot_step = step
            batches = min(max(_DRAIN_BATCHES, num_bytes // _DRAIN_BYTES), self._every // 2)
            self._drain_slots = -(-len(cache.slots) // max(batches, 1))
        self._complete_piece(pending, "snapshot")
        self._after_drain()

    def _after_drain(self) -> None:
        capture = self._cache.snapshot
        with self._lock:
            pending = self._pending.get(capture.epoch - 1)
            if pending is not None and "rows" in pending.missing and not capture.num_left:
                self._complete_piece(pending, "rows")

    # ---- lane net-out --------------------------------------------------------------------------------------------

    def before_write(self, epoch: int) -> None:
        """Rows that left the cache in an epoch are about to be written, in lane net-out.

        Raises:
            StoreError: a log could not be closed, or a server is not what it was.
        """
        if self._store_epoch < epoch:
            with self._stall():
                while self._store_epoch < epoch:
                    self._close_logs()
        self._num_writes += 1
        if self._inspect is not None and self._num_writes % _INSPECT_EVERY == 0:
            self._inspect()

    def _close_logs(self) -> None:
        """End an epoch in the store: every write-back of it has been acknowledged."""
        num_groups = self._store.rotate()
        hit("after-rotation")
        with self._lock:
            pending = self._pending[self._store_epoch]
            pending.num_groups = tuple(num_groups.tolist())
            self._store_epoch += 1
            self._complete_piece(pending, "log")

    def after_write(self, requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        """The store has acknowledged rows that left the cache in an epoch, for a batch."""
        if not requests:
            return
        for request in requests:
            self.written.add(request.table, request.ids)
        if self._has_files:
            self._wait_for(lambda: self._writer.backlog_bytes < BACKLOG_BYTES)
            num_bytes = sum(request.rows.nbytes for request in requests)
            self._writer.rows(lambda: requests, num_bytes, epoch=epoch, step=step)

    # ---- the end -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Training is over, rows are about to be flushed: copy what is left to copy."""
        capture = self._cache.snapshot
        while capture.num_left:
            self._wait_for(lambda: self._writer.backlog_bytes < BACKLOG_BYTES)
            capture.drain(max(self._drain_slots, 1))
            self._after_drain()

    def finish(self, step: int) -> None:
        """All rows are written back: make the last checkpoint; return when `on_part` has had it and all before.

        Raises:
            JobError: a checkpoint could not be written.
            StoreError: as `before_write`.
        """
        stall_s = self.stall_s
        if step > self._first_batch:
            pending = self._begin(step)
            if self._has_files:
                for piece in self._dense.pieces:
                    self._copy_piece(pending, piece)
                for counter in self._dense.loss_counters:
                    self._copy_loss(pending, counter)
            self._begin_snapshot(step)
            self.drain()
            self.before_write(self._cache.snapshot.epoch)
        self._wait_for(self._writer.is_idle)
        self.stall_s = stall_s

    # ---- helpers -------------------------------------------------------------------------------------------------

    @contextmanager
    def _stall(self) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        with self._lock:
            self.stall_s += time.monotonic() - start_s

    def _complete_piece(self, pending: PendingCheckpoint, piece: str) -> None:
        """A lane has done its part; the last of the dense part, and the last of all, send it off."""
        with self._lock:
            pending.missing.discard(piece)
            if piece.startswith("dense") and not any(missing.startswith("dense") for missing in pending.missing):
                self._writer.dense(pending)
            if not pending.missing:
                self._writer.complete(pending)

    def _wait_for(self, test: Callable[[], bool]) -> None:
        self._writer.wait_for(test, self._run.lost)

    def _take_part(self, step: int, epoch: int, part: Any) -> None:
        self._on_part(step, epoch, part)
        with self._lock:
            del self._pending[epoch]

    def _fail(self, error: BaseException) -> None:
        self._run.abort(error)
        if self._report is not None:
            # Now: lanes of this rank can be waiting for others that wait for those that have ended here.
            self._report(error)
