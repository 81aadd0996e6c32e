"""`recover`: makes a store's rows those of a checkpoint, whatever has happened to the store since.

    ledger.state ──check_namespace──> ours?  ──acquire──> nobody else writes any more
    bucket by bucket:   its checkpoint id and logs say which rows may differ ──> write those, delete what was not there
                        they say nothing, or of another checkpoint, ──> drop the bucket, write all its rows
                        or it has not as many rows as it must have then
    ledger.begin: the rows are those of the checkpoint; if the store has forgotten none of this

A bucket's logs name every row written since its checkpoint id was set. So a bucket with the checkpoint's id needs only
its logged rows and those that were dirty in a cache; and so does one with the id of the checkpoint before, if the store
has kept every group of the interval between them (a crash between a manifest and its commit). All writes go through the
fence, so a recovery that is cut short is recovered from by the next one. A server that is replaced in the middle of
a recovery may come back with a part of it: `begin` compares what was written with the log of it, and counts the rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.checkpoint.manifest import Manifest
from bagpipe.checkpoint.reader import CheckpointRows
from bagpipe.errors import InputError
from bagpipe.store.fencing.fence import BucketState, Fence, Ledger, invalidated
from bagpipe.store.interface import Store, WriteRequest
from bagpipe.store.keys import bucket_of
from bagpipe.util.failpoints import hit

__all__ = ["Recovered", "check_namespace", "is_empty", "is_usable", "recover", "take_over"]

#: Rows looked up and written at a time: 8 MiB of 128-byte records.
CHUNK_ROWS = 65_536

_NAMESPACE = "the store's namespace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a recovery did.

    Attributes:
        buckets_reloaded: buckets whose rows were all written; of the others, only those that may have differed.
        rows_written, bytes_written: row records.
        rows_deleted: rows that the checkpoint does not have.
        seconds: wall time.
    """

    buckets_reloaded: int
    rows_written: int
    bytes_written: int
    rows_deleted: int
    seconds: float


def check_namespace(states: Sequence[BucketState], namespace: str, lineage: str) -> None:
    """Refuse a namespace that holds somebody else's rows. Changes nothing.

    Args:
        states: `Ledger.state`.
        namespace: what an error calls the namespace.
        lineage: of the job's checkpoints; empty: it makes none.

    Raises:
        InputError: rows of another lineage, or rows of no lineage where there are checkpoints.
    """
    for state in states:
        theirs = state.checkpoint_id.partition(":")[0]
        if theirs == lineage:
            continue
        if theirs:
            what = "not those of this checkpoint.dir" if lineage else "and checkpoint.dir is not set"
            raise InputError(
                f"{namespace} belongs to a job's checkpoints ({theirs[:8]}), {what}: name their folder with "
                "checkpoint.dir, or use another store.namespace"
            )
        if state.num_rows:
            raise InputError(
                f"{namespace} holds rows that belong to no checkpoint: leave checkpoint.dir unset to go on from them, "
                "or use another store.namespace"
            )


def is_empty(states: Sequence[BucketState]) -> bool:
    """Whether there are no rows at all."""
    return not any(state.num_rows for state in states)


def is_usable(state: BucketState, bucket: int, checkpoint: Manifest) -> bool:
    """Whether a bucket's logs name every row that may differ from the checkpoint's."""
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


def take_over(ledger: Ledger, *, token: str, num_writers: int, namespace: str = _NAMESPACE) -> bool:
    """Make `token` the only one that may change the rows, and them the beginning, as they are. True if there are none.

    Raises:
        InputError, FencedError, StoreError: as `recover`.
    """
    ledger.acquire(token)
    states = ledger.state()
    check_namespace(states, namespace, "")
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
    namespace: str = _NAMESPACE,
    progress: Callable[[int, int], None] = lambda num_rows, num_bytes: None,
) -> Recovered:
    """Make the store's rows those of a checkpoint, and `token` the only one that may change them.

    Args:
        store: open, its namespace judged by `check_namespace`. Afterwards it writes as the recovery's writer.
        ledger: entered.
        token: of this job.
        checkpoint, rows: what is restored.
        num_writers: ranks of this job.
        namespace: what an error calls the namespace.
        progress: called after each chunk with the rows and bytes written so far.

    Raises:
        FencedError: another job has begun since. StoreError: the store failed. Either way the next recovery succeeds.
        InputError: a job of another lineage began while this one did; its rows are untouched.
    """
    start_s = time.monotonic()
    ledger.acquire(token)
    hit("after-acquire")
    # Only now: until then, others could write.
    states = ledger.state()
    check_namespace(states, namespace, checkpoint.lineage)
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
    lost = np.flatnonzero((found != wanted) | ~usable & (wanted > 0)).tolist()
    if lost:
        # From here on the rows are those of no checkpoint.
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
        rows_written=writer.rows_written,
        bytes_written=writer.bytes_written,
        rows_deleted=writer.rows_deleted,
        seconds=time.monotonic() - start_s,
    )


class _Writer:
    """Counts what it writes and deletes."""

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
        """Write the checkpoint's values of these rows, delete those it does not have."""
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
    """Rows that the checkpoint has, with their values; and the names of those it does not have."""
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
