"""Next uses inside the window: which later batch, of those seen so far, needs a row again.

One ring holds an int32 per unique row of every batch in the window, oldest batch first; by handle we keep the place of
a row's *latest* use. When a batch enters, that place learns the new batch as its next use:

    enter(batch 7): ring[place_of_handle[h]] = 7 ; place_of_handle[h] = new place
    leave():        ring of the oldest batch, in the order of its rows
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.eviction import NEVER

__all__ = ["NextUses"]

_NOT_IN_WINDOW = -1


class NextUses:
    """O(1) work per unique row of a batch, entering and leaving; O(window) memory."""

    def __init__(self, num_handles: int) -> None:
        self._ring = np.full(1 << 12, NEVER, dtype=np.int32)
        self._head = 0
        self._count = 0
        self._place_of_handle = np.full(num_handles, _NOT_IN_WINDOW, dtype=np.int32)

    def enter(self, handles: NDArray[np.int64], batch_index: int) -> NDArray[np.int64]:
        """A batch with these distinct rows enters the window. Those of them that no batch in the window used."""
        if self._count + handles.shape[0] > self._ring.shape[0]:
            self._grow_ring(self._count + handles.shape[0])
        previous = self._place_of_handle.take(handles)
        known = previous >= 0
        self._ring[previous.take(np.flatnonzero(known))] = batch_index
        tail = self._head + self._count
        for span in self._spans(tail, handles.shape[0]):
            self._ring[span] = NEVER
        places = np.arange(tail, tail + handles.shape[0], dtype=np.int32)
        places &= np.int32(self._ring.shape[0] - 1)
        self._place_of_handle[handles] = places
        self._count += handles.shape[0]
        return handles.take(np.flatnonzero(~known))

    def leave(self, handles: NDArray[np.int64]) -> NDArray[np.int32]:
        """The oldest batch leaves: the next use of each of its rows (`handles` as they entered), `NEVER` if none."""
        next_use = np.concatenate([self._ring[span] for span in self._spans(self._head, handles.shape[0])])
        self._head = (self._head + handles.shape[0]) & (self._ring.shape[0] - 1)
        self._count -= handles.shape[0]
        self._place_of_handle[handles.take(np.flatnonzero(next_use == NEVER))] = _NOT_IN_WINDOW
        return next_use

    def grow(self, num_handles: int) -> None:
        places = np.full(num_handles, _NOT_IN_WINDOW, dtype=np.int32)
        places[: self._place_of_handle.shape[0]] = self._place_of_handle
        self._place_of_handle = places

    def _spans(self, first: int, count: int) -> tuple[slice, slice]:
        """`count` places of the ring from running number `first` on: up to its end, and from its beginning."""
        size = self._ring.shape[0]
        start = first & (size - 1)
        stop = min(start + count, size)
        return slice(start, stop), slice(0, count - (stop - start))

    def _grow_ring(self, needed: int) -> None:
        mask = self._ring.shape[0] - 1
        entries = np.concatenate([self._ring[span] for span in self._spans(self._head, self._count)])
        self._ring = np.full(1 << (needed - 1).bit_length(), NEVER, dtype=np.int32)
        self._ring[: self._count] = entries
        used = np.flatnonzero(self._place_of_handle >= 0)
        self._place_of_handle[used] = (self._place_of_handle[used] - self._head) & mask
        self._head = 0
