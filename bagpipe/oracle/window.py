"""Next uses inside the window: the next batch that uses a row, and how often each rank uses it.

One ring holds an int32 per unique row of every batch in the window, oldest batch first. `entry_of_handle` is the ring
entry of a row's *latest* use. A batch that enters becomes the next use in that entry:

    enter(batch 7): ring[entry_of_handle[h]] = 7 ; entry_of_handle[h] = new entry
    leave():        ring of the oldest batch, in the order of its rows

With several ranks a second ring holds running counts: in how many batches each rank has used the row so far. The
difference between the latest entry and the oldest is the number of uses in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.eviction import NEVER
from bagpipe.oracle.handles import grown
from bagpipe.oracle.plan import NO_BATCH

__all__ = ["NextUses", "RankCounts", "UnseenUses"]

_NOT_IN_WINDOW = -1


class RankCounts:
    """Small counters, one per rank, packed into 64-bit words.

    A counter can overflow into its neighbour. Only differences are read, and the difference of two words is right as
    long as each counter's difference fits its bits.

    Args:
        world_size: counters per row.
        largest: the largest difference that is read.
    """

    def __init__(self, world_size: int, largest: int) -> None:
        self._dtype = np.min_scalar_type(largest)
        self._world_size = world_size
        self._per_word = 8 // self._dtype.itemsize

    @property
    def num_words(self) -> int:
        """Words per row."""
        return -(-self._world_size // self._per_word)

    def of(self, rows_of_ranks: Sequence[NDArray[np.int32]], num_rows: int) -> NDArray[np.uint64]:
        """uint64 ``[num_rows, num_words]``: a count of 1 for every rank and each of its distinct rows."""
        words = np.zeros((num_rows, self.num_words), dtype=np.uint64)
        for rank, rows in enumerate(rows_of_ranks):
            word, counter = divmod(rank, self._per_word)
            column = words[:, word]
            column[rows.astype(np.int64)] += np.uint64(1 << (8 * self._dtype.itemsize * counter))
        return words

    def unpack(self, words: NDArray[np.uint64]) -> NDArray[np.unsignedinteger]:
        """``[rows, world_size]``: counts by rank."""
        counts: NDArray[np.unsignedinteger] = words.astype("<u8").view(self._dtype.newbyteorder("<"))
        return counts[:, : self._world_size]


class NextUses:
    """O(1) work per unique row of a batch, entering and leaving; O(window) memory.

    Args:
        num_count_words: words of running counts per row (`RankCounts`); 0: no counts.
    """

    def __init__(self, num_handles: int, *, num_count_words: int = 0) -> None:
        self._ring = np.full(1 << 12, NEVER, dtype=np.int32)
        self._counts = np.zeros((self._ring.shape[0] if num_count_words else 0, num_count_words), dtype=np.uint64)
        self._head = 0
        self._count = 0
        self._before = np.empty(0, dtype=np.int32)  # by row of the latest batch, its entry before, as in the window
        self._latest = self._previous = 0  # rows of the latest batch, and of the one before if it is in the window
        self._entry_of_handle = np.full(num_handles, _NOT_IN_WINDOW, dtype=np.int32)

    def enter(
        self, handles: NDArray[np.int64], batch_index: int, counts: NDArray[np.uint64] | None = None
    ) -> NDArray[np.int64]:
        """Add a batch with these distinct rows. Returns the handles that no batch in the window used.

        Args:
            counts: uint64 ``[len(handles), num_count_words]``, the ranks that use each row; None without counts.
        """
        if self._count + handles.shape[0] > self._ring.shape[0]:
            self._grow_ring(self._count + handles.shape[0])
        previous = self._entry_of_handle.take(handles)
        is_known = previous >= 0
        known = np.flatnonzero(is_known)
        known_entries = previous.take(known)
        self._ring[known_entries] = batch_index
        tail = self._head + self._count
        if counts is not None:
            counts[known] += self._counts.take(known_entries, axis=0)
            first, second = self._spans(tail, handles.shape[0])
            self._counts[first] = counts[: first.stop - first.start]
            self._counts[second] = counts[first.stop - first.start :]
        for span in self._spans(tail, handles.shape[0]):
            self._ring[span] = NEVER
        entries = np.arange(tail, tail + handles.shape[0], dtype=np.int32)
        entries &= np.int32(self._ring.shape[0] - 1)
        self._entry_of_handle[handles] = entries
        self._before, self._previous, self._latest = previous, min(self._latest, self._count), handles.shape[0]
        self._count += handles.shape[0]
        return handles.take(np.flatnonzero(~is_known))

    def repeated(self) -> NDArray[np.bool_]:
        """bool ``[rows of the latest batch]``: the batch before used the row. Right after `enter`.

        If that batch has left the window, no row counts as such.
        """
        first = self._head + self._count - self._latest - self._previous
        places = (self._before - np.int32(first & (self._ring.shape[0] - 1))) & np.int32(self._ring.shape[0] - 1)
        repeated: NDArray[np.bool_] = (places < self._previous) & (self._before >= 0)
        return repeated

    def leave(self, handles: NDArray[np.int64]) -> NDArray[np.int32]:
        """Remove the oldest batch, whose rows are `handles`. Returns the next use of each row, `NEVER` if none."""
        next_use = np.concatenate([self._ring[span] for span in self._spans(self._head, handles.shape[0])])
        self._head = (self._head + handles.shape[0]) & (self._ring.shape[0] - 1)
        self._count -= handles.shape[0]
        self._entry_of_handle[handles.take(np.flatnonzero(next_use == NEVER))] = _NOT_IN_WINDOW
        return next_use

    def later_counts(self, handles: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """uint64 ``[len(positions), num_count_words]``: uses by rank of some rows of the oldest batch, after it.

        Args:
            handles: all rows of the oldest batch, as they entered.
            positions: which of them.
        """
        entries = (self._head + positions) & (self._ring.shape[0] - 1)
        latest = self._entry_of_handle.take(handles.take(positions))
        later: NDArray[np.uint64] = self._counts.take(latest, axis=0) - self._counts.take(entries, axis=0)
        return later

    def are_in_window(self, handles: NDArray[np.int64]) -> NDArray[np.bool_]:
        """bool ``[len(handles)]``: whether a batch in the window uses each row."""
        used: NDArray[np.bool_] = self._entry_of_handle.take(handles) >= 0
        return used

    def grow(self, num_handles: int) -> None:
        self._entry_of_handle = grown(self._entry_of_handle, num_handles, _NOT_IN_WINDOW)

    def _spans(self, first: int, count: int) -> tuple[slice, slice]:
        """`count` entries of the ring from number `first` on: up to the ring's end, then from its start."""
        size = self._ring.shape[0]
        start = first & (size - 1)
        stop = min(start + count, size)
        return slice(start, stop), slice(0, count - (stop - start))

    def _grow_ring(self, needed: int) -> None:
        mask = self._ring.shape[0] - 1
        spans = self._spans(self._head, self._count)
        entries = np.concatenate([self._ring[span] for span in spans])
        self._ring = np.full(1 << (needed - 1).bit_length(), NEVER, dtype=np.int32)
        self._ring[: self._count] = entries
        if self._counts.size:
            kept = np.concatenate([self._counts[span] for span in spans])
            self._counts = np.zeros((self._ring.shape[0], self._counts.shape[1]), dtype=np.uint64)
            self._counts[: self._count] = kept
        used = np.flatnonzero(self._entry_of_handle >= 0)
        self._entry_of_handle[used] = (self._entry_of_handle[used] - self._head) & mask
        self._head = 0


class UnseenUses:
    """The latest batch whose window did not show the batch that is planned: until then a row of it could leave as idle.

    A full window shows the batch from ``lookahead - 1`` batches before on. A window is short at the end of the data,
    where nothing follows, and where the batches that follow have not arrived.

    Attributes:
        latest: that batch, of the batch planned last; `NO_BATCH`: none.
    """

    def __init__(self, lookahead: int) -> None:
        self.latest = NO_BATCH
        self._lookahead = lookahead
        self._short: deque[tuple[int, int]] = deque()  # batches with short windows, each with the last batch in it

    def plan(self, batch_index: int, last_index: int) -> None:
        """A batch is planned; the last batch in its window is `last_index`. Batches come in order."""
        if last_index < batch_index + self._lookahead - 1:
            self._short.append((batch_index, last_index))
        while self._short and self._short[0][1] < batch_index:
            self.latest = max(self.latest, self._short.popleft()[0])
        self.latest = max(self.latest, batch_index - self._lookahead)
