"""`MemoryLedger`: the administration of a namespace in memory. One lock covers all buckets, so all change at once."""

from __future__ import annotations

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
from bagpipe.store.keys import FIELD_DTYPE, bucket_of
from bagpipe.store.memory.space import Log, Space

__all__ = ["MemoryLedger"]


class MemoryLedger:
    """See `bagpipe.store.fencing.fence.Ledger`.

    Args:
        space: what it administers.
        num_buckets: of the namespace.
        place: for messages.
        token: in whose name it acts until `acquire`; empty: nobody's.
    """

    def __init__(self, space: Space, *, num_buckets: int, place: str, token: str = "") -> None:
        self.num_buckets = num_buckets
        self._space = space
        self._place = place
        self._token = token

    def __enter__(self) -> MemoryLedger:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def state(self) -> tuple[BucketState, ...]:
        """See `Ledger.state`."""
        with self._space.lock:
            num_rows = self._num_rows()
            logs = sorted(self._space.logs.items(), key=lambda item: (item[0].token, item[0].epoch, item[0].writer))
            return tuple(
                BucketState(
                    owner=self._space.owner,
                    checkpoint_id=self._space.checkpoint_id,
                    logs=tuple(
                        LogState(
                            token=fence.token,
                            epoch=fence.epoch,
                            writer=fence.writer,
                            num_groups=int(log.num_groups[bucket]),
                        )
                        for fence, log in logs
                    ),
                    num_rows=int(num_rows[bucket]),
                )
                for bucket in range(self.num_buckets)
            )

    def acquire(self, token: str) -> None:
        """See `Ledger.acquire`."""
        check_token(token)
        with self._space.lock:
            self._space.owner = self._token = token
            self._space.logs.setdefault(Fence(token=token, writer=0, epoch=0), Log(self.num_buckets))

    def touched(self, bucket: int) -> NDArray[np.void]:
        """See `Ledger.touched`."""
        with self._space.lock:
            parts = [fields for log in self._space.logs.values() for fields in log.fields]
        fields = np.concatenate([np.empty(0, FIELD_DTYPE), *parts])
        buckets = bucket_of(fields["table"].astype(np.uint32), fields["id"].astype(np.int64), self.num_buckets)
        return distinct_fields(fields[buckets == bucket])

    def delete(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> None:
        """See `Ledger.delete`."""
        with self._space.lock:
            self._check_owner()
            for number, table in enumerate(self._space.tables):
                self._space.tables[number] = table.without(np.isin(table.ids, ids[tables == number]))

    def drop(self, bucket: int) -> None:
        """See `Ledger.drop`."""
        with self._space.lock:
            self._check_owner()
            for number, table in enumerate(self._space.tables):
                self._space.tables[number] = table.without(self._buckets(number, table.ids) == bucket)

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
        groups = np.zeros(self.num_buckets, np.int64) if num_groups is None else np.asarray(num_groups)
        with self._space.lock:
            self._check_owner()
            recovery = self._space.logs.get(Fence(token=self._token, writer=0, epoch=0))
            if recovery is None:  # it has begun
                return
            self._check_same("groups", recovery.num_groups, groups)
            if num_rows is not None:
                self._check_same("rows", self._num_rows(), np.asarray(num_rows))
            self._space.checkpoint_id = checkpoint_id
            self._space.logs = {
                Fence(token=self._token, writer=writer, epoch=1): Log(self.num_buckets) for writer in range(num_writers)
            }

    def commit(self, checkpoint_id: str, epoch: int, num_groups: Sequence[Sequence[int]] = ()) -> None:
        """See `Ledger.commit`."""
        check_checkpoint_id(checkpoint_id)
        with self._space.lock:
            self._check_owner()
            if self._space.checkpoint_id and self._space.checkpoint_id in (
                checkpoint_id,
                invalidated(self._space.checkpoint_id),
            ):
                return
            for writer, groups in enumerate(num_groups):
                log = self._space.logs.get(Fence(token=self._token, writer=writer, epoch=epoch))
                self._check_same("groups", log.num_groups if log is not None else None, np.asarray(groups))
            self._space.checkpoint_id = checkpoint_id
            self._space.logs = {
                fence: log
                for fence, log in self._space.logs.items()
                if fence.token != self._token or fence.epoch > epoch
            }

    def invalidate(self, checkpoint_id: str) -> None:
        """See `Ledger.invalidate`."""
        check_checkpoint_id(checkpoint_id)
        with self._space.lock:
            self._check_owner()
            self._space.checkpoint_id = checkpoint_id

    def inspect(self) -> None:
        """See `Ledger.inspect`."""
        with self._space.lock:
            if self._token:
                self._check_owner()

    def _num_rows(self) -> NDArray[np.int64]:
        """By bucket. Call under the lock."""
        num_rows = np.zeros(self.num_buckets, np.int64)
        for number, table in enumerate(self._space.tables):
            num_rows += np.bincount(self._buckets(number, table.ids), minlength=self.num_buckets)
        return num_rows

    def _check_same(self, what: str, found: NDArray[np.int64] | None, expected: NDArray[np.int64]) -> None:
        """RolledBackError unless every bucket has what it must have."""
        if found is None or (found != expected).any():
            raise RolledBackError(f"{self._place} has lost {what} that were written")

    def _check_owner(self) -> None:
        """Call under the lock.

        Raises:
            FencedError, RolledBackError: another job is the owner, or none is any more.
        """
        if not self._space.owner:
            raise RolledBackError(f"{self._place} has no owner any more, expected {self._token!r}")
        if self._space.owner != self._token:
            raise FencedError(f"{self._place} was taken over: its owner is {self._space.owner!r}, not {self._token!r}")

    def _buckets(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.uint16]:
        return bucket_of(np.full(1, table, np.uint32), ids, self.num_buckets)
