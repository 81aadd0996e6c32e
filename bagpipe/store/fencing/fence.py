"""Who may write into a namespace, and which rows were written since the last checkpoint. Pure: key names and records.

Beside the rows of each bucket, all under its hash tag:

    <ns>:{b}                                 hash    rows
    <ns>:{b}:owner                           string  token of the job that took the bucket over last
    <ns>:{b}:checkpoint_id                   string  the checkpoint that rows and logs are relative to
    <ns>:{b}:logs                            set     <token>:<epoch>:<writer> of every log that exists
    <ns>:{b}:log:<token>:<epoch>:<writer>    list    "", then one element per group: the fields it wrote
    <ns>:{b}:fenced:<token>:<epoch>:<writer> list    a log, once another job has taken the bucket over
    <ns>:{b}:open                            hash    the rows, while a group is written (never seen from outside)

A *writer* is a rank; an *epoch* is what lies between two checkpoints (0: recovery). A *group* is what one command
sequence writes into one bucket: it is logged first, then written, atomically. So, at any moment, and after any loss
of the latest commands: every row that differs from the checkpoint is named in a log, or was not written back by then.
A log lives only as long as its writer owns the bucket: taking over renames it away, and a group without its log is
refused. A group carries the length its log must have, so one sent twice is written once, and one lost is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
    "log_key",
    "log_name",
    "logs_key",
    "open_key",
    "owner_key",
    "parse_log_name",
]

#: A token: generation in decimal, a dash, a nonce of 128 bits in hexadecimal.
_TOKEN = re.compile(r"\d{1,18}-[0-9a-f]{32}")

MAX_CHECKPOINT_ID_BYTES = 200

#: How the checkpoint id of rows that are not to be trusted ends.
INVALIDATED = ":invalidated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """What a writer proves with every group.

    Attributes:
        token: of the job, see `check_token`.
        writer: its rank.
        epoch: of its logs: how many checkpoints the job has begun since it took over, counted from 1; 0 in recovery.
    """

    token: str
    writer: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogState:
    """A log, and how many groups it names."""

    token: str
    epoch: int
    writer: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketState:
    """What stands beside the rows of a bucket; empty strings where there is nothing.

    Attributes:
        owner: token.
        checkpoint_id: checkpoint; `invalidated` too where a log that is named is gone.
        logs: by token, epoch, writer.
        num_rows: rows in the bucket.
    """

    owner: str = ""
    checkpoint_id: str = ""
    logs: tuple[LogState, ...] = ()
    num_rows: int = 0


class Ledger(Protocol):
    """Administration of a namespace's fence, by one process and one thread at a time. Context manager.

    Every call may be repeated after a doubtful answer. All raise `StoreError` if the server fails, and those that
    change anything `FencedError` once another token has acquired a bucket, `RolledBackError` if there is no owner.
    """

    num_buckets: int

    def __enter__(self) -> Ledger: ...

    def __exit__(self, *details: object) -> None: ...

    def state(self) -> tuple[BucketState, ...]:
        """By bucket; changes nothing."""
        ...

    def acquire(self, token: str) -> None:
        """Make `token` the owner of every bucket, and open an empty log of epoch 0 for its writer 0.

        From then on no group of any earlier token is written. Logs of other tokens keep their names in the `state`.
        A checkpoint id beside which nobody knows of any log is invalidated: one always has logs.
        """
        ...

    def touched(self, bucket: int) -> NDArray[np.void]:
        """Rows named in any log of the bucket, as `FIELD_DTYPE`, distinct, in ascending order."""
        ...

    def delete(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """Remove rows. For the owner."""
        ...

    def drop(self, bucket: int) -> None:
        """Remove all rows of a bucket. For the owner."""
        ...

    def begin(
        self,
        checkpoint_id: str,
        num_writers: int,
        *,
        num_groups: Sequence[int] | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """Recovery is over: remove all logs, set the checkpoint id, open empty logs of epoch 1 for writers 0 … n - 1.

        Args:
            num_groups: by bucket, groups in the log of epoch 0; None: nothing was written.
            num_rows: by bucket, the rows it must hold; None: any number.

        Raises:
            RolledBackError: a bucket has not what it must have: what was acknowledged since `acquire` is lost. Its
                checkpoint id stays as it is.
        """
        ...

    def commit(self, checkpoint_id: str, epoch: int, num_groups: Sequence[Sequence[int]] = ()) -> None:
        """A checkpoint is safe: set the checkpoint id and remove the owner's logs up to this epoch.

        An invalidated checkpoint id stays invalidated.

        Args:
            num_groups: by writer and bucket, groups in its log of this epoch: what the checkpoint id vouches for.

        Raises:
            RolledBackError: a bucket's log has another length: what was acknowledged is lost. Its checkpoint id
                stays as it is.
        """
        ...

    def invalidate(self, checkpoint_id: str) -> None:
        """Set every checkpoint id to one that no checkpoint has, so that the next recovery loads all rows from files.

        For the owner.
        """
        ...

    def inspect(self) -> None:
        """Raise `StoreError` if a server restarted, changed its role, dropped or expired rows since `__enter__`, may
        drop them from now on, or fails to persist them; names the server, what it said then and what it says now.
        """
        ...


def check_token(token: str) -> None:
    """ValueError unless it is a generation in decimal, a dash, and 32 hexadecimal digits."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"expected a token <generation>-<32 hexadecimal digits>, got {token!r}")


def check_checkpoint_id(checkpoint_id: str) -> None:
    """ValueError if it is too long."""
    if len(checkpoint_id.encode()) > MAX_CHECKPOINT_ID_BYTES:
        num_bytes = len(checkpoint_id.encode())
        raise ValueError(f"expected a checkpoint id of at most {MAX_CHECKPOINT_ID_BYTES} bytes, got {num_bytes}")


def distinct_fields(fields: NDArray[np.void]) -> NDArray[np.void]:
    """`FIELD_DTYPE` ``[n]`` without repetitions, ascending by table, then id."""
    order = np.lexsort((fields["id"], fields["table"]))
    tables, ids = fields["table"][order], fields["id"][order]
    first = np.ones(len(fields), np.bool_)
    first[1:] = (tables[1:] != tables[:-1]) | (ids[1:] != ids[:-1])
    # Numpy turns joined records to the machine's byte order.
    return fields[order[first]].astype(FIELD_DTYPE, copy=False)


def owner_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":owner"


def checkpoint_id_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":checkpoint_id"


def logs_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":logs"


def open_key(bucket_key: bytes) -> bytes:
    return bucket_key + b":open"


def log_name(fence: Fence) -> bytes:
    """Member of the set of logs."""
    return f"{fence.token}:{fence.epoch}:{fence.writer}".encode()


def log_key(bucket_key: bytes, fence: Fence) -> bytes:
    return b"%b:log:%b" % (bucket_key, log_name(fence))


def fenced_log_key(bucket_key: bytes, fence: Fence) -> bytes:
    """Where a log lies once its job has lost the bucket."""
    return b"%b:fenced:%b" % (bucket_key, log_name(fence))


def invalidated(checkpoint_id: str) -> str:
    """An id that no checkpoint has, but that still names the job of the rows; "" stays "". Idempotent."""
    return checkpoint_id if not checkpoint_id or checkpoint_id.endswith(INVALIDATED) else checkpoint_id + INVALIDATED


def parse_log_name(name: bytes) -> Fence:
    """The writer of a log. ValueError if it is no such name."""
    token, epoch, writer = name.decode("ascii").split(":")
    check_token(token)
    return Fence(token=token, epoch=int(epoch), writer=int(writer))
