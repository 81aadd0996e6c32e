"""`RowSnapshot`: copy-on-write snapshots of the dirty rows, taken while training continues.

    begin ──> pending: dirty rows changed since the previous snapshot      named: all dirty rows
    before a lane changes or releases slots ──before_change──> copies the pending rows among them
    between batches ──drain(n)──> copies the pending rows of the next n slots, until all slots are done

Rule of this file: *a pending slot still holds the row as of `begin`*. Masks change and copies start (on a device: are
enqueued) under one lock; once a slot is no longer pending, its lane can change it. On a device, the stream of a lane
waits for copies enqueued by other lanes. An *epoch* is the interval between two snapshots, counted from 1. Evicted rows
get their epoch under the same lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_transfer import CopiedRows
from bagpipe.cache.slots import Slots, SlotTable
from bagpipe.oracle.assembly import select_rows
from bagpipe.oracle.plan import OwnerPlan, RowList
from bagpipe.pipeline.stream import Event, Streams

__all__ = ["CopiedRows", "RowSnapshot", "SnapshotReceiver"]

#: Starts copying rows out of slots, both ordered by table; the returned function waits for them.
ReadOut = Callable[[RowList, Slots], CopiedRows]


class SnapshotReceiver(Protocol):
    """Consumer of a snapshot. Called under the lock, so it must not block."""

    def take_rows(self, rows: CopiedRows, num_bytes: int) -> None:
        """Take dirty rows that changed since the previous snapshot."""
        ...

    def take_names(self, tables: NDArray[np.int32], ids: NDArray[np.int64], stored_checks: NDArray[np.uint64]) -> None:
        """Take table numbers and ids of dirty rows, and the check words of the store's rows; ``[n]`` each."""
        ...


class RowSnapshot:
    """Snapshots of one cache. Any lane can call it.

    Args:
        slots: slots of the cache.
        num_tables: number of tables.
        row_bytes: bytes of the widest row.
        read_out: copies rows to the host.
        streams: streams of the device.

    Attributes:
        lock: guards the masks of the slots.
        epoch: number of the current epoch.
        num_left: slots that `drain` has yet to visit.
    """

    def __init__(self, slots: SlotTable, num_tables: int, row_bytes: int, read_out: ReadOut, streams: Streams) -> None:
        self.lock = threading.RLock()
        self.epoch = 1
        self.num_left = 0
        self._slots = slots
        self._num_tables = num_tables
        self._row_bytes = row_bytes
        self._read_out = read_out
        self._streams = streams
        self._receiver: SnapshotReceiver | None = None
        self._next_slot = 0
        self._copies: dict[object, Event] = {}  # by stream: event after its latest copy

    def begin(self, receiver: SnapshotReceiver | None) -> int:
        """Begin a snapshot. The previous one is complete.

        Args:
            receiver: receives the rows; None: only the epoch ends, no row is copied.

        Returns:
            Bytes of the pending rows.
        """
        slots = self._slots
        with self.lock:
            assert not self.num_left, "drained before"
            self.epoch += 1
            self._receiver = receiver
            if receiver is None:
                return 0
            np.logical_and(slots.dirty, slots.changed, out=slots.pending)
            np.copyto(slots.named, slots.dirty)
            slots.changed.fill(False)
            self.num_left, self._next_slot = len(slots), 0
            return int(np.count_nonzero(slots.pending)) * self._row_bytes

    def before_change(self, slots: Slots) -> None:
        """Copy the pending rows among `slots`, ordered by table, before the calling lane changes them."""
        with self.lock:
            self._await_copies()
            if self.num_left:
                self._take_rows(slots)

    def before_release(self, slots: Slots) -> None:
        """Copy and name the rows in `slots`, ordered by table, before the calling lane releases them."""
        with self.lock:
            self.before_change(slots)
            if self.num_left:
                self._take_names(slots)

    def drop(self, owner: OwnerPlan) -> None:
        """Empty the slots of the rows that expired; a snapshot under way gets them as they were.

        Raises:
            JobError: a slot holds another row.
        """
        if owner.expired is None or owner.expired_slots is None:
            return
        positions = np.flatnonzero(owner.expired_slots >= 0)
        rows, slots = select_rows(owner.expired, positions), owner.expired_slots.take(positions)
        self._slots.check(rows, slots)
        with self.lock:
            self.before_release(slots)
            self._slots.release(slots)

    def drain(self, num_slots: int) -> None:
        """Copy the pending rows of the next `num_slots` slots. The stream of the lane follows the latest row update."""
        with self.lock:
            first = self._next_slot
            self._next_slot = end = first + min(num_slots, self.num_left)
            slots = first + np.flatnonzero(self._slots.named[first:end])
            slots = slots[np.argsort(self._slots.slot_table[slots], kind="stable")]
            self._take_rows(slots)
            self._take_names(slots)
            self.num_left -= end - first

    def _take_rows(self, slots: Slots) -> None:
        slots = slots[self._slots.pending[slots]]
        if len(slots) and self._receiver is not None:
            rows = self._slots.rows_at(slots, self._num_tables)
            self._receiver.take_rows(self._read_out(rows, slots), len(slots) * self._row_bytes)
            self._slots.pending[slots] = False
            stream = self._streams.here()
            copied = stream.record()
            if copied is not None:
                self._copies[stream.key] = copied

    def _take_names(self, slots: Slots) -> None:
        slots = slots[self._slots.named[slots]]
        if len(slots) and self._receiver is not None:
            table = self._slots
            self._receiver.take_names(table.slot_table[slots], table.slot_id[slots], table.stored_checks[slots])
            table.named[slots] = False

    def _await_copies(self) -> None:
        if self._copies:
            stream = self._streams.here()
            for key, copied in self._copies.items():
                if key != stream.key:
                    stream.wait(copied)
