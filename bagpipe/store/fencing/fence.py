"""Fencing of a namespace: owner tokens and write logs per bucket. Key names, records and the `Ledger` interface.

A job acquires every bucket with its token; after that, writes of earlier tokens fail. Every write and every deletion is
logged, so the logs name the rows that differ from the last checkpoint. Keys beside the rows of bucket b, in the same
hash slot:

    <ns>:{b}                                 hash    rows
    <ns>:{b}:owner                           string  token of the last job that acquired the bucket
    <ns>:{b}:checkpoint_id                   string  the checkpoint that rows and logs are relative to
    <ns>:{b}:logs                            set     <token>:<epoch>:<writer> of every log
    <ns>:{b}:log:<token>:<epoch>:<writer>    list    "", then one element per group: its fields
    <ns>:{b}:fenced:<token>:<epoch>:<writer> list    a log whose job has lost the bucket
    <ns>:{b}:open                            hash    the rows while a group is written (never visible from outside)
    <ns>:{0}:job                             hash    the namespace's job, see `bagpipe.store.job_record`; bucket 0 only

A *writer* is a rank. An *epoch* is the interval between two checkpoints (0: recovery). A *group* is what one command
sequence writes into one bucket or deletes from it; logging and applying a group is one atomic step. Hence, at any time
and after any loss of recent commands, every row that differs from the checkpoint is named in a log, or was not written
back by then.

A log lives only while its writer's job owns the bucket: acquiring the bucket renames the log, and a group without its
log is rejected. A group states the length that its log must have, so a duplicate is applied once and a lost group is
detected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import FIELD_DTYPE

__all__ = [
    "INVALIDATED",
    "MAX_CHECKPOINT_ID_BYTES",
    "BucketState",
    "Fence",
    "Ledger",
    "LogState",
    "check_checkpoint_id",
    "check_token",
    "checkpoint_id_key",
    "distinct_fields",
    "fenced_log_key",
    "invalidated",
    "job_key",
    "log_key",
    "log_name",
    "logs_key",
    "open_key",
    "owner_key",
    "parse_log_name",
]

#: A token: decimal generation, dash, 128-bit hexadecimal nonce.
_TOKEN = re.compile(r"\d{1,18}-[0-9a-f]{32}")

MAX_CHECKPOINT_ID_BYTES = 200

#: Suffix of invalidated checkpoint ids.
INVALIDATED = ":invalidated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Fencing token, writer and epoch, sent with every group.

    Attributes:
        token: token of the job, see `check_token`.
        writer: rank.
        epoch: number of the interval between two checkpoints of the job, from 1; 0 in recovery.
    """

    token: str
    writer: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """A log and its number of groups."""

    token: str
    epoch: int
    writer: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """Fencing state of a bucket.

    Attributes:
        owner: token; empty: none.
        checkpoint_id: empty: none; `invalidated` if a named log is missing.
        logs: sorted by token, epoch, writer.
        num_rows: rows in the bucket.
    """

    owner: str = ""
    checkpoint_id: str = ""
    logs: tuple[LogState, ...] = ()
    num_rows: int = 0


class Ledger(Protocol):
    """Administers owners, logs and checkpoint ids of a namespace. Context manager, for one process and one thread.

    Every call is idempotent, so it can be repeated after a lost reply. Every call raises `StoreError` if a server
    fails. Calls that change anything raise `FencedError` if another token owns a bucket, `RolledBackError` if a
    bucket has no owner.
    """

    num_buckets: int

    def __enter__(self) -> Ledger: ...

    def __exit__(self, *details: object) -> None: ...

    def state(self) -> tuple[BucketState, ...]:
        """State of every bucket. Read-only."""
        ...

    def acquire(self, token: str) -> None:
        """Make `token` the owner of every bucket, and open an empty log of epoch 0 for its writer 0.

        After this, groups of earlier tokens are rejected. Logs of other tokens stay in `state`.
        A checkpoint id without logs is invalidated: a valid one always has logs.
        """
        ...

    def touched(self, bucket: int) -> NDArray[np.void]:
        """Distinct rows named in any log of the bucket, as `FIELD_DTYPE`, ascending."""
        ...

    def delete(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """Remove rows. Owner only."""
        ...

    def drop(self, bucket: int) -> None:
        """Remove all rows of a bucket. Owner only."""
        ...

    def begin(
        self,
        checkpoint_id: str,
        num_writers: int,
        *,
        num_groups: Sequence[int] | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """End recovery: remove all logs, set the checkpoint id, open empty logs of epoch 1 for writers 0 … n - 1.

        Args:
            num_groups: by bucket, expected groups in the log of epoch 0; None: no group.
            num_rows: by bucket, expected rows; None: any number.

        Raises:
            RolledBackError: a bucket has other groups or rows: it lost acknowledged writes since `acquire`. Its
                checkpoint id is unchanged.
        """
        ...

    def commit(self, checkpoint_id: str, epoch: int, num_groups: Sequence[Sequence[int]] = ()) -> None:
        """Record a durable checkpoint: set the checkpoint id and remove the owner's logs up to this epoch.

        An invalidated checkpoint id stays invalidated.

        Args:
            num_groups: by writer and bucket, expected groups in the log of this epoch.

        Raises:
            RolledBackError: a log has another length: acknowledged writes are lost. The bucket's checkpoint id is
                unchanged.
        """
        ...

    def invalidate(self, checkpoint_id: str) -> None:
        """Set every bucket's checkpoint id to one that no checkpoint has. Owner only.

        The next recovery then loads all rows from files.
        """
        ...

    def job(self) -> JobRecord | None:
        """The record of the namespace's job; None without a valid one. Read-only."""
        ...

    def record_job(self, record: JobRecord) -> None:
        """Replace the record of the namespace's job. Owner only."""
        ...

    def clear(self) -> None:
        """Remove all rows, logs, checkpoint ids and records, then the owner: the namespace is new again. Owner only.

        Later writes of the owner are rejected too. An interrupted call leaves a part of the rows.
        """
        ...

    def inspect(self) -> None:
        """Check the servers and the owner.

        Raises:
            StoreError: since `__enter__` a server was restarted, changed its role, evicted or expired rows, can now
                evict them, or no longer persists them. Names the server, the old and the new value.
        """
        ...


def check_token(token: str) -> None:
    """Raise ValueError unless `token` is a decimal generation, a dash and 32 hexadecimal digits."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"expected a token <generation>-<32 hexadecimal digits>, got {token!r}")


def check_checkpoint_id(checkpoint_id: str) -> None:
    """Raise ValueError if a checkpoint id is longer than `MAX_CHECKPOINT_ID_BYTES`."""
    if len(checkpoint_id.encode()) > MAX_CHECKPOINT_ID_BYTES:
        num_bytes = len(checkpoint_id.encode())
        raise ValueError(f"expected a checkpoint id of at most {MAX_CHECKPOINT_ID_BYTES} bytes, got {num_bytes}")


def distinct_fields(fields: NDArray[np.void]) -> NDArray[np.void]:
    """Distinct elements of `FIELD_DTYPE` ``[n]``, ascending by table, then id."""
    order = np.lexsort((fields["id"], fields["table"]))
    tables, ids = fields["table"][order], fields["id"][order]
    first = np.ones(len(fields), np.bool_)
    first[1:] = (tables[1:] != tables[:-1]) | (ids[1:] != ids[:-1])
    # Concatenation converts records to native byte order.
    return fields[order[first]].astype(FIELD_DTYPE, copy=False)


def owner_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":owner"


def checkpoint_id_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":checkpoint_id"


def logs_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":logs"


def open_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":open"


def job_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":job"


def log_name(fence: Fence) -> bytes:
    """Name of a log in the set of logs."""
    return f"{fence.token}:{fence.epoch}:{fence.writer}".encode()


def log_key(bucket_key: bytes, fence: Fence) -> bytes:
    return b"%b:log:%b" % (bucket_key, log_name(fence))


def fenced_log_key(bucket_key: bytes, fence: Fence) -> bytes:
    """Key of a log whose job has lost the bucket."""
    return b"%b:fenced:%b" % (bucket_key, log_name(fence))


def invalidated(checkpoint_id: str) -> str:
    """An id that no checkpoint has, but that still names the rows' job; "" stays "". Idempotent."""
    return checkpoint_id if not checkpoint_id or checkpoint_id.endswith(INVALIDATED) else checkpoint_id + INVALIDATED


def parse_log_name(name: bytes) -> Fence:
    """Inverse of `log_name`. Raises ValueError for any other name."""
    token, epoch, writer = name.decode("ascii").split(":")
    check_token(token)
    return Fence(token=token, epoch=int(epoch), writer=int(writer))
