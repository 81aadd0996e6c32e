"""`SlowStore`: a store behind gates that a test opens and closes. Uses no clock and no sleep.

with SlowStore(store, read_gate=gate) as slow:
    gate.hold()
    ... start a read in a thread ...
    gate.wait_arrived(1)     the read waits at the gate
    gate.release()           the read continues
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bagpipe.store.fencing.fence import Fence, Ledger
from bagpipe.store.interface import DeleteRequest, ReadResult, Rows, Store, StoreStatistics, WriteRequest
from bagpipe.store.row_sums import RowSums
from bagpipe.types.schema import RowSchema

__all__ = ["Gate", "SlowStore"]

#: Timeout of a gate. A gate that stays closed is a bug in the test.
_PATIENCE_S = 60.0


class Gate:
    """A gate that calls pass one at a time. Initially open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes: int | None = None  # None: open; otherwise the number of calls that can still pass
        self._arrived = 0

    def hold(self) -> None:
        """Close the gate: later calls wait."""
        with self._changed:
            self._passes = 0

    def release(self) -> None:
        """Open the gate for waiting and future calls."""
        with self._changed:
            self._passes = None
            self._changed.notify_all()

    def allow(self, count: int = 1) -> None:
        """Let `count` more calls pass a held gate."""
        with self._changed:
            if self._passes is not None:
                self._passes += count
                self._changed.notify_all()

    @property
    def arrived(self) -> int:
        """Calls that have reached the gate since it was made, passed or waiting."""
        with self._changed:
            return self._arrived

    def wait_arrived(self, count: int, timeout_s: float = _PATIENCE_S) -> None:
        """Wait until `count` calls have reached the gate since it was made.

        Raises:
            TimeoutError: fewer calls came within the timeout.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= count, timeout_s):
                raise TimeoutError(f"expected {count} calls at the gate, got {self._arrived}")

    def pass_through(self) -> None:
        """Pass the gate, waiting while it is held.

        Raises:
            TimeoutError: the gate stayed closed.
        """
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._passes is None or self._passes > 0, _PATIENCE_S):
                raise TimeoutError("nobody opened the gate")
            if self._passes is not None:
                self._passes -= 1


class SlowStore:
    """A store whose reads and writes pass a gate first and can be made to fail. Other calls are forwarded.

    Args:
        store: the wrapped store; entered and exited with this one.
        read_gate: passed by every `read_many` before it is sent.
        write_gate: passed by every `write_many` and `delete_many` before it is sent.
    """

    def __init__(self, store: Store, *, read_gate: Gate | None = None, write_gate: Gate | None = None) -> None:
        self.schema: RowSchema = store.schema
        self.store = store
        self.read_gate = read_gate or Gate()
        self.write_gate = write_gate or Gate()
        self._failures: dict[str, Exception] = {}

    def __enter__(self) -> Self:
        self.store.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.__exit__(kind, error, trace)

    def fail_reads(self, error: Exception) -> None:
        """Make every later read raise `error` after it has passed the gate."""
        self._failures["read"] = error

    def fail_writes(self, error: Exception) -> None:
        """Make every later write or deletion raise `error` after it has passed the gate."""
        self._failures["write"] = error

    def check(self, *, reloads: bool = False, resets: bool = False) -> bool:
        """See `Store.check`."""
        return self.store.check(reloads=reloads, resets=resets)

    def claim(self, *, reloads: bool = False) -> bool:
        """See `Store.claim`."""
        return self.store.claim(reloads=reloads)

    def read(self, table: int, ids: NDArray[np.int64]) -> ReadResult:
        """See `Store.read`."""
        return self.read_many([(table, ids)])[0]

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        """See `Store.read_many`."""
        self.read_gate.pass_through()
        self._fail("read")
        return self.store.read_many(requests)

    def write(self, table: int, ids: NDArray[np.int64], rows: Rows) -> None:
        """See `Store.write`."""
        self.write_many([WriteRequest(table, ids, rows)])

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        """See `Store.write_many`."""
        self.write_gate.pass_through()
        self._fail("write")
        self.store.write_many(requests)

    def delete_many(self, requests: Sequence[DeleteRequest]) -> None:
        """See `Store.delete_many`."""
        self.write_gate.pass_through()
        self._fail("write")
        self.store.delete_many(requests)

    def fence(self, fence: Fence) -> None:
        """See `Store.fence`."""
        self.store.fence(fence)

    def rotate(self) -> NDArray[np.int64]:
        """See `Store.rotate`."""
        return self.store.rotate()

    def reset(self, token: str) -> None:
        """See `Store.reset`."""
        self.store.reset(token)

    def ledger(self) -> Ledger:
        """See `Store.ledger`."""
        return self.store.ledger()

    def ids(self, table: int) -> NDArray[np.int64]:
        """See `Store.ids`."""
        return self.store.ids(table)

    def ids_by_table(self, tables: Sequence[int]) -> Iterator[Mapping[int, NDArray[np.int64]]]:
        """See `Store.ids_by_table`."""
        return self.store.ids_by_table(tables)

    def sum_changes(self) -> RowSums:
        """See `Store.sum_changes`."""
        return self.store.sum_changes()

    def statistics(self) -> StoreStatistics:
        """See `Store.statistics`."""
        return self.store.statistics()

    def _fail(self, kind: str) -> None:
        if kind in self._failures:
            raise self._failures[kind]
