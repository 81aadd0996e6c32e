"""`recover`: restores the store's rows to a checkpoint, from any state of the store.

    ledger.acquire: all other writers are fenced out
    per bucket:   checkpoint id and logs name the rows that can differ ──> write those, delete rows the checkpoint lacks
                  no id or logs, another checkpoint, or a wrong row count ──> drop the bucket, write all its rows
                  with an audit, also a wrong sum of check words
    ledger.begin: sets the checkpoint's id, if the store still holds all of these writes

A bucket's logs name every row written since its checkpoint id was set. A bucket with the checkpoint's id thus needs
only its logged rows and the rows that were dirty in a cache. The same holds for a bucket with the parent's id if the
store has kept every group of the interval between them (a crash between a manifest and its commit). All writes go
through the fence, so the next recovery repairs an interrupted one. A server replaced during a recovery can return with
a part of the writes: `begin` compares the writes with their log and counts the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.checkpoint_rows import CheckpointRows
from bagpipe.checkpoint.existing_rows import decide
from bagpipe.checkpoint.manifest import Manifest
from bagpipe.errors import CorruptRowError
from bagpipe.store.audit import stored_sums
from bagpipe.store.fencing.fence import BucketState, Fence, Ledger, invalidated
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.store.row_sums import RowSums
from bagpipe.util.failpoints import hit

__all__ = ["Recovered", "is_empty", "is_usable", "recover", "take_over"]

#: Rows looked up and written at a time: 8 MiB of 128-byte records.
CHUNK_ROWS = 65_536

_NAMESPACE = "the store's namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Statistics of a recovery.

    Attributes:
        buckets_reloaded: buckets rewritten completely; in the others only rows that could differ were written.
        buckets_changed: of these, buckets whose rows only the audit found to differ.
        rows_written, bytes_written: row records.
        rows_deleted: rows that the checkpoint does not have.
        seconds: wall time.
    """

    buckets_reloaded: int
    buckets_changed: int
    rows_written: int
    bytes_written: int
    rows_deleted: int
    seconds: float


def is_empty(states: Sequence[BucketState]) -> bool:
    """Whether the namespace has no rows."""
    return not any(state.num_rows for state in states)


def is_usable(state: BucketState, bucket: int, checkpoint: Manifest) -> bool:
    """Whether a bucket's logs name every row that can differ from the checkpoint."""
    if not state.checkpoint_id:
        return False
    if state.checkpoint_id == checkpoint.checkpoint_id:
        return True
    if state.checkpoint_id != checkpoint.parent_checkpoint_id:
        return False
    kept = {
        log.writer: log.num_groups
        for log in state.logs
        if log.token == checkpoint.token and log.epoch == checkpoint.epoch
    }
    return all(kept.get(part.rank) == part.num_groups[bucket] for part in checkpoint.parts)


def take_over(
    ledger: Ledger, *, token: str, num_writers: int, existing: str = "refuse", namespace: str = _NAMESPACE
) -> bool:
    """Acquire the namespace for `token` and start from its current rows. True if there are none.

    Args:
        ledger, token, num_writers, namespace: as in `recover`.
        existing: as in `bagpipe.checkpoint.existing_rows.decide`.

    Raises:
        InputError, FencedError, StoreError: as `recover`.
    """
    ledger.acquire(token)
    states = ledger.state()
    decide(states, ledger.job(), namespace=namespace, lineage="", existing=existing)
    ledger.begin("", num_writers)
    return is_empty(states)


def recover(
    store: Store,
    ledger: Ledger,
    *,
    token: str,
    checkpoint: Manifest,
    rows: CheckpointRows,
    num_writers: int,
    audit: RowSums | None = None,
    namespace: str = _NAMESPACE,
    progress: Callable[[int, int], None] = lambda num_rows, num_bytes: None,
) -> Recovered:
    """Restore the store's rows to a checkpoint; afterwards only `token` can change them.

    Args:
        store: open store without rows of another job. Afterwards it writes as the recovery's writer.
        ledger: entered ledger.
        token: fencing token of this job.
        checkpoint, rows: the checkpoint to restore.
        num_writers: number of ranks of this job.
        audit: sums of the checkpoint's rows. All rows of the store are read, and a bucket with another sum is
            rewritten. None: the logs are trusted.
        namespace: name of the namespace in error messages.
        progress: called after each chunk with the rows and bytes written so far.

    Raises:
        FencedError: another job has begun since. The next recovery succeeds.
        StoreError: the store failed. The next recovery succeeds.
        InputError: a job of another lineage began concurrently; its rows are untouched.
    """
    start_s = time.monotonic()
    ledger.acquire(token)
    hit("after-acquire")
    # Read the state after the acquire: before it, other jobs could write.
    states = ledger.state()
    decide(states, ledger.job(), namespace=namespace, lineage=checkpoint.lineage, existing="refuse")
    store.fence(Fence(token=token, writer=0, epoch=0))
    writer = _Writer(store, ledger, progress)
    usable = np.array([is_usable(state, bucket, checkpoint) for bucket, state in enumerate(states)])
    for bucket in np.flatnonzero(usable).tolist():
        if any(log.num_groups for log in states[bucket].logs):
            touched = ledger.touched(bucket)
            writer.restore(touched["table"].astype(np.uint32), touched["id"].astype(np.int64), rows)
    tables, ids = rows.dirty()
    stale = usable[bucket_of(tables, ids, len(states))]
    writer.restore(tables[stale], ids[stale], rows)
    wanted = rows.count(len(states))
    if usable.any():
        states = ledger.state()
    found = np.array([state.num_rows for state in states])
    suspect = (found != wanted) | ~usable & (wanted > 0)
    changed = np.zeros(len(states), np.bool_) if audit is None else _changed(store, audit) & ~suspect
    lost = np.flatnonzero(suspect | changed).tolist()
    if lost:
        # From here on the rows match no checkpoint.
        ledger.invalidate(invalidated(checkpoint.checkpoint_id))
        for bucket in lost:
            if found[bucket]:
                ledger.drop(bucket)
        for requests in rows.requests(buckets=lost, num_buckets=len(states)):
            writer.write(requests)
    hit("before-begin")
    num_groups = store.rotate()
    ledger.begin(checkpoint.checkpoint_id, num_writers, num_groups=num_groups.tolist(), num_rows=wanted.tolist())
    hit("after-begin")
    return Recovered(
        buckets_reloaded=len(lost),
        buckets_changed=int(np.count_nonzero(changed)),
        rows_written=writer.rows_written,
        bytes_written=writer.bytes_written,
        rows_deleted=writer.rows_deleted,
        seconds=time.monotonic() - start_s,
    )


def _changed(store: Store, expected: RowSums) -> NDArray[np.bool_]:
    """Buckets whose rows are not those of the checkpoint, bool ``[num_buckets]``; all if a row is damaged."""
    changed = np.ones(expected.num_buckets, np.bool_)
    with suppress(CorruptRowError):
        np.not_equal(stored_sums(store).values, expected.values, out=changed)
    return changed


class _Writer:
    """Writes and deletes rows, with counts."""

    def __init__(self, store: Store, ledger: Ledger, progress: Callable[[int, int], None]) -> None:
        self._store = store
        self._ledger = ledger
        self._progress = progress
        self.rows_written = self.bytes_written = self.rows_deleted = 0

    def write(self, requests: Sequence[WriteRequest]) -> None:
        self._store.write_many(requests)
        self.rows_written += sum(len(request.ids) for request in requests)
        self.bytes_written += sum(request.rows.nbytes for request in requests)
        self._progress(self.rows_written, self.bytes_written)
        hit("mid-recovery")

    def restore(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: CheckpointRows) -> None:
        """Write the checkpoint's values of these rows; delete rows it does not have."""
        for first in range(0, len(ids), CHUNK_ROWS):
            chunk = slice(first, first + CHUNK_ROWS)
            requests, gone = _split(tables[chunk], ids[chunk], rows)
            if requests:
                self.write(requests)
            if len(gone[1]):
                self._ledger.delete(*gone)
                self.rows_deleted += len(gone[1])
                hit("mid-recovery")


def _split(
    tables: NDArray[np.uint32], ids: NDArray[np.int64], rows: CheckpointRows
) -> tuple[list[WriteRequest], tuple[NDArray[np.uint32], NDArray[np.int64]]]:
    """Write requests for rows in the checkpoint, and the names (tables, ids) of rows it does not have."""
    requests, gone = [], []
    for table in np.unique(tables).tolist():
        wanted = ids[tables == table]
        result = rows.read(table, wanted)
        if result.found.any():
            requests.append(WriteRequest(table, wanted[result.found], result.rows[result.found]))
        missing = wanted[~result.found]
        gone.append((np.full(len(missing), table, np.uint32), missing))
    names = [np.concatenate(part) for part in zip(*gone, strict=True)]
    return requests, (names[0], names[1])
