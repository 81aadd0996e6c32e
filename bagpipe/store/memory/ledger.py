"""`MemoryLedger`: the ledger of a namespace in memory. One lock covers all buckets, so they change together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import FencedError, RolledBackError
from bagpipe.store.fencing.fence import (
    BucketState,
    Fence,
    LogState,
    check_checkpoint_id,
    check_token,
    distinct_fields,
    invalidated,
)
from bagpipe.store.job_record import JobRecord
from bagpipe.store.keys import FIELD_DTYPE, bucket_of
from bagpipe.store.memory.table import Table

__all__ = ["MemoryLedger", "MemoryNamespace"]


class MemoryNamespace:
    """Rows and fencing state of one namespace. Hold `lock` for every access.

    Attributes:
        label: name of the namespace, for messages.
        num_buckets: reported by the ledger; rows are not stored by bucket.
        record: schema record; empty: not claimed.
        tables: by table number; created on first use.
        owner, checkpoint_id: of all buckets.
        logs: by writer and epoch: the rows of each write, as `FIELD_DTYPE`.
        job: record of its job.
    """

    def __init__(self, label: str, num_buckets: int) -> None:
        self.label = label
        self.num_buckets = num_buckets
        self.lock = threading.Lock()
        self.record: dict[str, str] = {}
        self.tables: list[Table] = []
        self.owner = ""
        self.checkpoint_id = ""
        self.logs: dict[Fence, list[NDArray[np.void]]] = {}
        self.job: JobRecord | None = None

    def check_owner(self, token: str) -> None:
        """Raise FencedError if the owner is another job, RolledBackError if there is none."""
        if not self.owner:
            raise RolledBackError(f"{self.label} has no owner any more, expected {token!r}")
        if self.owner != token:
            raise FencedError(f"{self.label} was taken over: its owner is {self.owner!r}, not {token!r}")

    def num_groups(self, fence: Fence) -> list[int]:
        """Groups in each bucket's log of a writer; no buckets if it has no log."""
        if fence not in self.logs:
            return []
        counts = np.zeros(self.num_buckets, np.int64)
        for fields in self.logs[fence]:
            counts += np.bincount(self.buckets(fields["table"], fields["id"]), minlength=self.num_buckets) > 0
        return counts.tolist()

    def num_rows(self) -> list[int]:
        """Rows of each bucket."""
        counts = np.zeros(self.num_buckets, np.int64)
        for number, table in enumerate(self.tables):
            counts += np.bincount(self.buckets(np.full(1, number), table.ids), minlength=self.num_buckets)
        return counts.tolist()

    def buckets(self, tables: NDArray[np.generic], ids: NDArray[np.generic]) -> NDArray[np.uint16]:
        """Bucket of each row, see `bucket_of`; for words of any byte order."""
        return bucket_of(tables.astype(np.uint32), ids.astype(np.int64), self.num_buckets)


class MemoryLedger:
    """See `bagpipe.store.fencing.fence.Ledger`.

    Args:
        namespace: the namespace to administer.
        token: acts for this token until `acquire`; empty: for none.
    """

    def __init__(self, namespace: MemoryNamespace, *, token: str = "") -> None:
        self.num_buckets = namespace.num_buckets
        self._namespace = namespace
        self._token = token

    def __enter__(self) -> MemoryLedger:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def state(self) -> tuple[BucketState, ...]:
        """See `Ledger.state`."""
        namespace = self._namespace
        with namespace.lock:
            num_rows = namespace.num_rows()
            fences = sorted(namespace.logs, key=lambda fence: (fence.token, fence.epoch, fence.writer))
            logs = [
                [LogState(token=fence.token, epoch=fence.epoch, writer=fence.writer, num_groups=num_groups)
                 for num_groups in namespace.num_groups(fence)]
                for fence in fences
            ]  # fmt: skip
            return tuple(
                BucketState(
                    owner=namespace.owner,
                    checkpoint_id=namespace.checkpoint_id,
                    logs=tuple(log[bucket] for log in logs),
                    num_rows=num_rows[bucket],
                )
                for bucket in range(self.num_buckets)
            )

    def acquire(self, token: str) -> None:
        """See `Ledger.acquire`."""
        check_token(token)
        with self._namespace.lock:
            self._namespace.owner = self._token = token
            self._namespace.logs.setdefault(Fence(token=token, writer=0, epoch=0), [])

    def touched(self, bucket: int) -> NDArray[np.void]:
        """See `Ledger.touched`."""
        with self._namespace.lock:
            parts = [fields for log in self._namespace.logs.values() for fields in log]
        fields = np.concatenate([np.empty(0, FIELD_DTYPE), *parts])
        return distinct_fields(fields[self._namespace.buckets(fields["table"], fields["id"]) == bucket])

    def delete(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """See `Ledger.delete`."""
        with self._namespace.lock:
            self._namespace.check_owner(self._token)
            for number, table in enumerate(self._namespace.tables):
                table.remove(ids[tables == number])

    def drop(self, bucket: int) -> None:
        """See `Ledger.drop`."""
        with self._namespace.lock:
            self._namespace.check_owner(self._token)
            for number, table in enumerate(self._namespace.tables):
                here = self._namespace.buckets(np.full(1, number), table.ids) == bucket
                table.remove(table.ids[here])

    def begin(
        self,
        checkpoint_id: str,
        num_writers: int,
        *,
        num_groups: Sequence[int] | None = None,
        num_rows: Sequence[int] | None = None,
    ) -> None:
        """See `Ledger.begin`."""
        check_checkpoint_id(checkpoint_id)
        namespace, recovery = self._namespace, Fence(token=self._token, writer=0, epoch=0)
        with namespace.lock:
            namespace.check_owner(self._token)
            if recovery not in namespace.logs:  # an earlier call succeeded
                return
            self._check_complete(recovery, [0] * self.num_buckets if num_groups is None else num_groups)
            if num_rows is not None and namespace.num_rows() != list(num_rows):
                raise RolledBackError(f"{namespace.label} has lost rows that were written")
            namespace.checkpoint_id = checkpoint_id
            namespace.logs = {Fence(token=self._token, writer=writer, epoch=1): [] for writer in range(num_writers)}

    def commit(self, checkpoint_id: str, epoch: int, num_groups: Sequence[Sequence[int]] = ()) -> None:
        """See `Ledger.commit`."""
        check_checkpoint_id(checkpoint_id)
        namespace = self._namespace
        with namespace.lock:
            namespace.check_owner(self._token)
            current = namespace.checkpoint_id
            if current and current in (checkpoint_id, invalidated(current)):
                return
            for writer, groups in enumerate(num_groups):
                self._check_complete(Fence(token=self._token, writer=writer, epoch=epoch), groups)
            namespace.checkpoint_id = checkpoint_id
            namespace.logs = {
                fence: log for fence, log in namespace.logs.items() if fence.token != self._token or fence.epoch > epoch
            }

    def invalidate(self, checkpoint_id: str) -> None:
        """See `Ledger.invalidate`."""
        check_checkpoint_id(checkpoint_id)
        with self._namespace.lock:
            self._namespace.check_owner(self._token)
            self._namespace.checkpoint_id = checkpoint_id

    def job(self) -> JobRecord | None:
        """See `Ledger.job`."""
        with self._namespace.lock:
            return self._namespace.job

    def record_job(self, record: JobRecord) -> None:
        """See `Ledger.record_job`."""
        with self._namespace.lock:
            self._namespace.check_owner(self._token)
            self._namespace.job = record

    def clear(self) -> None:
        """See `Ledger.clear`."""
        namespace = self._namespace
        with namespace.lock:
            namespace.check_owner(self._token)
            namespace.record, namespace.tables, namespace.logs, namespace.job = {}, [], {}, None
            namespace.owner = namespace.checkpoint_id = ""

    def inspect(self) -> None:
        """See `Ledger.inspect`."""
        with self._namespace.lock:
            if self._token:
                self._namespace.check_owner(self._token)

    def _check_complete(self, fence: Fence, num_groups: Sequence[int]) -> None:
        if self._namespace.num_groups(fence) != list(num_groups):
            raise RolledBackError(f"{self._namespace.label} has lost groups that were written")
