"""`CheckpointWriter`: a thread that writes a rank's checkpoint files and a second one that publishes its parts.

lanes ──rows, deletions, dense parts, "that was all"──> work ──writer──> journals, dense, dirty and row files
                                                         └──Part──> parts ──publisher──> on_part

The writer thread never waits for a lane or another rank, so every lane's wait for it ends. It waits only for device
copies and sums that lanes have enqueued, behind batches that wait for no later checkpoint. The publisher thread waits
for other ranks, whose lanes can wait for this rank's. So no lane waits for it, unless more checkpoints are pending than
such waits explain. Complete parts are published before an error of the writer is reported. After an error the threads
drain their queues without doing work. The callers bound the queues; see `Recorder`.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.journal import RowWriter, save_dirty
from bagpipe.checkpoint.manifest import FileEntry, Part
from bagpipe.errors import InputError, JobError, StoreError
from bagpipe.store.interface import DeleteRequest, WriteRequest
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema
from bagpipe.util.failpoints import hit
from bagpipe.util.outputs import has_no_room

if TYPE_CHECKING:
    from bagpipe.cache.snapshot import CopiedRows
    from bagpipe.cache.staging import PendingTensor
    from bagpipe.checkpoint.dense_state import DenseCopy

__all__ = ["CheckpointPaths", "CheckpointWriter", "OnPart", "PendingCheckpoint", "SnapshotSink"]

#: ``on_part(step, epoch, part)``; part is None without files.
OnPart = Callable[[int, int, Part | None], None]

_Copy = TypeVar("_Copy")
_Queue = deque[Callable[[], None] | None]

#: Seconds between two checks of `is_lost` in `wait_for`.
_POLL_S = 0.2


@dataclass(slots=True, kw_only=True, eq=False)
class PendingCheckpoint:
    """An incomplete checkpoint. Lanes complete its items; the writer thread reads it once none is missing.

    Attributes:
        step: step of the checkpoint.
        epoch: epoch of the logs that end with it.
        missing: names of the incomplete items.
        dense: in-flight dense copies by model chunk; see `Recorder`.
        loss_sums: by counter, over all earlier batches.
        earlier_rows: in-flight copy of rows as they were; None: nothing keeps them, or not yet.
        unshared: names of tensors that can differ between replicas.
        names: tables and ids of dirty rows, and the check words of the store's rows.
        num_groups: groups in this rank's logs.
        sum_changes: `Store.sum_changes` when these logs were closed.
        progress: see `Part`.
        file: the dense file, once it is written.
    """

    step: int
    epoch: int
    missing: set[str]
    dense: dict[str, DenseCopy] = field(default_factory=dict)
    loss_sums: dict[str, PendingTensor] = field(default_factory=dict)
    earlier_rows: DenseCopy | None = None
    unshared: frozenset[str] = frozenset()
    names: list[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.uint64]]] = field(default_factory=list)
    num_groups: tuple[int, ...] = ()
    sum_changes: RowSums = field(default_factory=lambda: RowSums(0))
    progress: dict[str, Any] = field(default_factory=dict)
    file: FileEntry | None = None

    def losses(self) -> dict[str, Any]:
        """Loss sums for `progress`. Blocks until they are on the host."""
        # In the order of stage instances: the total does not depend on which lane was first.
        names = sorted(self.loss_sums, key=lambda name: (len(name), name))
        sums = {name: self.loss_sums[name].get().item() for name in names}
        return {"loss_sum": sum(sums.values()), "loss_sums": sums}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPaths:
    """Folders of a job's checkpoint files.

    Attributes:
        generation: folder of this start of the job; exists.
        step: returns the folder of a step, creating it if necessary.
    """

    generation: Path
    step: Callable[[int], Path]


class CheckpointWriter:
    """One rank's writer and publisher threads.

    Args:
        rank: this rank.
        paths: folders of the files. None: no files, parts are None.
        schema: schema of the rows.
        on_part: called with each part, in order, in the publisher thread; can block.
        on_error: called with the first error in the publisher thread.

    Attributes:
        error: the first error.
        backlog_bytes: bytes of rows queued for writing.
        num_dense: dense parts queued for writing.
        check: see `Recorder.start`.
    """

    def __init__(
        self,
        rank: int,
        paths: CheckpointPaths | None,
        schema: RowSchema,
        on_part: OnPart,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.error: BaseException | None = None
        self.backlog_bytes = 0
        self.num_dense = 0
        self._schema = schema
        self.check: Callable[[int], None] = lambda step: None
        self._rank = rank
        self._paths = paths
        self._on_part = on_part
        self._on_error = on_error
        self._changed = threading.Condition()
        self._work: _Queue = deque()
        self._parts: _Queue = deque()
        self._journals: dict[int, RowWriter] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=f"bagpipe-{name}", daemon=True)
            for name, queue in (("checkpoint-writer", self._work), ("publisher", self._parts))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop the threads. Discards queued work."""
        with self._changed:
            for queue in (self._work, self._parts):
                queue.append(None)
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for journal in self._journals.values():
            journal.discard()

    def rows(self, rows: Callable[[], Sequence[WriteRequest]], num_bytes: int, *, epoch: int, step: int) -> None:
        """Queue rows for an epoch's journal. The writer thread calls `rows`. Does not block."""

        def append() -> None:
            self._journal(epoch).append(self._copied(rows, step), step)

        self._put_journal(append, num_bytes)

    def deletions(self, requests: Sequence[DeleteRequest], *, epoch: int, step: int) -> None:
        """Queue deletions of rows for an epoch's journal. Does not block."""
        num_bytes = sum(request.ids.nbytes for request in requests)
        self._put_journal(lambda: self._journal(epoch).delete(requests, step), num_bytes)

    def dense(self, pending: PendingCheckpoint) -> None:
        """Queue a complete dense part. Does not block."""
        self._put(self._work, lambda: self._write_dense(pending))

    def complete(self, pending: PendingCheckpoint) -> None:
        """Queue a complete checkpoint, after all its rows. Does not block."""
        self._put(self._work, lambda: self._complete(pending))

    def admit(self) -> None:
        """Count a dense part whose copy is about to begin."""
        with self._changed:
            self.num_dense += 1

    @property
    def num_parts(self) -> int:
        """Parts not yet published."""
        return len(self._parts)

    def wait_for(self, test: Callable[[], bool], is_lost: Callable[[], BaseException | None]) -> None:
        """Wait until `test` is true. Raises the first error, or the result of `is_lost`."""
        with self._changed:
            while True:
                error = self.error or is_lost()
                if error is not None:
                    raise error  # before the test: after an error the queues are drained without work
                if test():
                    return
                self._changed.wait(_POLL_S)

    def is_idle(self) -> bool:
        """Whether both queues are empty."""
        return not self._work and not self._parts  # the writer queues a part before it removes its own work

    def _put(self, queue: _Queue, work: Callable[[], None]) -> None:
        with self._changed:
            queue.append(work)
            self._changed.notify_all()

    def _run(self, queue: _Queue) -> None:
        has_failed = False
        while True:
            with self._changed:
                while not queue:
                    self._changed.wait()
                work = queue[-1] and queue[0]  # None at the end of the queue stops the thread immediately
            if work is None:
                return
            if not has_failed and self.error is None:
                try:
                    work()
                except BaseException as error:
                    has_failed = True
                    report = functools.partial(self._report_error, _user_error(error, self._paths))
                    if queue is self._parts:
                        report()
                    else:
                        self._put(self._parts, report)  # after the complete parts
            with self._changed:
                queue.popleft()
                self._changed.notify_all()

    def _report_error(self, error: BaseException) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()
        self._on_error(error)

    def _put_journal(self, append: Callable[[], None], num_bytes: int) -> None:
        """Queue an append to a journal, which counts in `backlog_bytes` until it is done."""
        with self._changed:
            self.backlog_bytes += num_bytes

        def work() -> None:
            append()
            with self._changed:
                self.backlog_bytes -= num_bytes

        self._put(self._work, work)

    def _copied(self, get: Callable[[], _Copy], step: int) -> _Copy:
        """What a copy to the host has. Raises JobError: it is not finite, or before that a gradient was not."""
        try:
            return get()
        except JobError:
            self.check(step)
            raise

    def _journal(self, epoch: int) -> RowWriter:
        if epoch not in self._journals:
            assert self._paths is not None, "rows go to files"
            self._journals[epoch] = RowWriter(self._paths.generation, self._schema, rank=self._rank, epoch=epoch)
        return self._journals[epoch]

    def _write_dense(self, pending: PendingCheckpoint) -> None:
        from bagpipe.checkpoint.dense_state import DenseState, combine

        assert self._paths is not None, "a dense part goes to a file"
        states = {name: self._copied(copy.get, pending.step) for name, copy in pending.dense.items()}
        pending.progress.update(pending.losses())
        digests = {}
        for name, state in states.items():
            shared = {key: value for key, value in state.tensors.items() if key not in pending.unshared}
            # Ranks that have the same state compare it; each has its own pieces.
            label = f"{name}, share of rank {self._rank}" if state.pieces else name
            digests[label] = DenseState(tensors=shared, values=state.values, pieces=state.pieces).digest()
        pending.progress["dense"] = digests
        rows = [] if pending.earlier_rows is None else [pending.earlier_rows.get()]
        pending.file = combine([*states.values(), *rows]).save(self._paths.step(pending.step), self._rank)
        pending.dense.clear()
        pending.earlier_rows = None
        with self._changed:
            self.num_dense -= 1

    def _complete(self, pending: PendingCheckpoint) -> None:
        self.check(pending.step)
        part = None if self._paths is None else self._part(pending, self._paths.step(pending.step))
        self._put(self._parts, lambda: self._publish(pending, part))

    def _publish(self, pending: PendingCheckpoint, part: Part | None) -> None:
        hit("after-checkpoint-data")
        self._on_part(pending.step, pending.epoch, part)

    def _part(self, pending: PendingCheckpoint, folder: Path) -> Part:
        assert pending.file is not None, "the dense part is written first"
        dirty, sums = None, pending.sum_changes
        if pending.names:
            numbers, ids, checks = (np.concatenate(column) for column in zip(*pending.names, strict=True))
            tables = numbers.astype(np.uint32)
            dirty = save_dirty(folder, rank=self._rank, tables=tables, ids=ids)
            stored = RowSums(sums.num_buckets)
            stored.add_rows(tables, ids, checks)
            sums -= stored
            pending.names.clear()
        journal = self._journals.pop(pending.epoch, None)
        rows = () if journal is None else journal.seal(folder, pending.step)
        return Part(
            rank=self._rank,
            dense=pending.file,
            rows=rows,
            dirty=dirty,
            num_groups=pending.num_groups,
            row_sums=tuple(sums.to_list()),
            progress=pending.progress,
        )


class SnapshotSink:
    """`bagpipe.cache.snapshot.SnapshotReceiver` of one checkpoint: passes the snapshot's rows to the writer."""

    def __init__(self, writer: CheckpointWriter, pending: PendingCheckpoint) -> None:
        self._writer = writer
        self._making = pending

    def take_rows(self, rows: CopiedRows, num_bytes: int) -> None:
        self._writer.rows(rows, num_bytes, epoch=self._making.epoch, step=self._making.step)

    def take_names(self, tables: NDArray[np.int32], ids: NDArray[np.int64], stored_checks: NDArray[np.uint64]) -> None:
        self._making.names.append((tables, ids, stored_checks))


def _user_error(error: BaseException, paths: CheckpointPaths | None) -> BaseException:
    """Wrap an error for the user."""
    if isinstance(error, JobError | StoreError):
        return error
    if isinstance(error, InputError):
        # A file found broken or missing during the run is not an input error.
        wrapped = JobError(f"a checkpoint cannot be made: {error}")
        wrapped.__cause__ = error
        return wrapped
    if isinstance(error, OSError):
        folder = error.filename or (paths.generation.parent if paths is not None else "")
        where = f" ({folder})" if folder else ""
        reason = error.strerror or str(error)
        remedy = "; free space there, and the job resumes from them" if has_no_room(error) else ""
        wrapped = JobError(f"a checkpoint cannot be written: {reason}{where}; earlier checkpoints are intact{remedy}")
        wrapped.__cause__ = error
        return wrapped
    return error
