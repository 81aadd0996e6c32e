"""`RowSnapshot`: the dirty rows of one moment, copied while training goes on.

    begin ──> pending: dirty, and changed since the moment before      named: all dirty rows
    a lane about to change or give up slots ──before_change──> copies the pending ones among them
    a lane between batches ──drain(n)──> copies those of the next n slots      until all slots have been looked at

Rule of this file: *a slot that is pending holds what it held at the moment.* Masks are read and changed, and copies
made (on a device: enqueued), under one lock; a slot that is no longer pending is its lane's to change. On a device, a
lane's stream waits for the copies that others have enqueued. Moments also number the time between them: an *epoch* is
what lies between two, counted from 1, and rows that leave the cache are told their epoch under the same lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache.row_transfer import CopiedRows
from bagpipe.cache.slots import Slots, SlotTable
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import Event, Streams

__all__ = ["CopiedRows", "RowSnapshot", "SnapshotReceiver"]

#: Copies rows out of slots, both ordered by table; who calls the result waits until they are on the host.
ReadOut = Callable[[RowList, Slots], CopiedRows]


class SnapshotReceiver(Protocol):
    """Takes what is captured. Called under the lock, so it must not wait for anything."""

    def take_rows(self, rows: CopiedRows, num_bytes: int) -> None:
        """Rows that were dirty, and had changed since the moment before."""
        ...

    def take_names(self, tables: NDArray[np.int32], ids: NDArray[np.int64]) -> None:
        """Rows that were dirty; ``[n]`` each."""
        ...


class RowSnapshot:
    """Captures rows of one cache. Any lane; see above.

    Args:
        slots: of the cache.
        num_tables: tables.
        row_bytes: of the widest row.
        read_out: copies rows.
        streams: of the rows' device.

    Attributes:
        lock: held while masks are looked at.
        epoch: the current one.
        num_left: slots not looked at yet.
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
        self._copies: dict[object, Event] = {}  # by stream: after its latest copy

    def begin(self, receiver: SnapshotReceiver | None) -> int:
        """The moment is now. Nothing of the moment before is left.

        Args:
            receiver: gets the rows; None: only an epoch is over, nothing is captured.

        Returns:
            Bytes of the rows that are pending.
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
        """The calling lane is about to change these rows. Slots are ordered by table."""
        with self.lock:
            self._await_copies()
            if self.num_left:
                self._take_rows(slots)

    def before_release(self, slots: Slots) -> None:
        """The calling lane is about to give up these slots, ordered by table."""
        with self.lock:
            self.before_change(slots)
            if self.num_left:
                self._take_names(slots)

    def drain(self, num_slots: int) -> None:
        """Look at so many slots more. For a lane whose stream is behind the latest update of every row."""
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
            self._receiver.take_names(self._slots.slot_table[slots], self._slots.slot_id[slots])
            self._slots.named[slots] = False

    def _await_copies(self) -> None:
        if self._copies:
            stream = self._streams.here()
            for key, copied in self._copies.items():
                if key != stream.key:
                    stream.wait(copied)
