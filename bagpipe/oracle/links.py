"""Links of rows to their previous use in the window: found where a batch is indexed, used where it is planned.

    shard    unique rows ──its own map of window rows──> RowLinks: (batches back, place in the table there)
    planner  RowLinks ──ring of the window's handles──> handles; only rows that are new to the window are looked up

A link is a function of the batches alone. So a shard needs no word from the planner, and can begin anew anywhere: the
links of a batch name none before the window's first. They pay off where a lookup hashes the row (`HashHandles`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.handles import HashHandles, grown
from bagpipe.oracle.plan import RowList

__all__ = ["LinkFinder", "LinkedHandles", "RowLinks"]

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLinks:
    """The previous use of each unique row of a batch, in the window.

    Attributes:
        back: int32 ``[U]``, how many batches before; 0: the window has none.
        place: int32 ``[U]``, the row's place among the unique rows of its table there; 0 if there is none.
    """

    back: NDArray[np.int32]
    place: NDArray[np.int32]


class LinkFinder:
    """Finds links, batch after batch. O(1) work per unique row, O(window) memory.

    Args:
        lookahead: batches of the window, the one with the links included.
    """

    def __init__(self, lookahead: int) -> None:
        self._lookahead = lookahead
        self._handles = HashHandles(planned_bits=64)  # the filter is not used
        self._window: deque[tuple[int, NDArray[np.int64]]] = deque()
        # By handle; free handles have no batch.
        self._batch = np.full(self._handles.num_handles, _NONE, dtype=np.int32)
        self._place = np.zeros(self._handles.num_handles, dtype=np.int32)

    def find(self, rows: RowList, batch_index: int) -> RowLinks:
        """The links of a batch with these unique rows. Batches follow each other."""
        handles = self._handles.lookup_or_add(rows)
        if self._handles.num_handles > self._batch.shape[0]:
            self._grow(self._handles.num_handles)
        before = self._batch.take(handles)
        is_linked = before != _NONE
        back = np.where(is_linked, batch_index - before, 0).astype(np.int32)
        place = np.where(is_linked, self._place.take(handles), 0).astype(np.int32)
        self._batch[handles] = batch_index
        starts = rows.table_offsets[:-1].astype(np.int32)
        self._place[handles] = np.arange(len(rows), dtype=np.int32) - np.repeat(starts, np.diff(rows.table_offsets))
        self._window.append((batch_index, handles))
        if len(self._window) >= self._lookahead:
            self._leave(*self._window.popleft())
        return RowLinks(back=back, place=place)

    def _leave(self, batch_index: int, handles: NDArray[np.int64]) -> None:
        """The next batch does not see this one: forget the rows that none since has used."""
        unused = handles.take(np.flatnonzero(self._batch.take(handles) == batch_index))
        self._batch[unused] = _NONE
        self._handles.release(unused)

    def _grow(self, num_handles: int) -> None:
        for name, fill in (("_batch", _NONE), ("_place", 0)):
            setattr(self, name, grown(getattr(self, name), num_handles, fill))


class LinkedHandles:
    """Handles of linked rows, from those of earlier batches.

    Args:
        handles: of the planner.
        num_tables: tables of all batches.
        lookahead: batches of the window.
    """

    def __init__(self, handles: HashHandles, *, num_tables: int, lookahead: int) -> None:
        self._handles = handles
        self._num_tables = num_tables
        self._lookahead = lookahead
        self._ring = np.empty(1 << 12, dtype=np.int64)  # handles of the latest batches' rows
        self._counts: deque[int] = deque(maxlen=lookahead)  # rows of each of these batches
        self._tail = 0  # rows put in so far
        # Where the rows of each table of a batch begin, by batch number modulo the window.
        self._starts = np.zeros((lookahead, num_tables), dtype=np.int64)

    def lookup_or_add(
        self, rows: RowList, links: RowLinks, batch_index: int, *, window_start: int
    ) -> NDArray[np.int64]:
        """Handles of a batch's distinct rows, int64 ``[len(rows)]``; allocated where missing. Batches in order.

        Args:
            window_start: the first batch that is not planned yet. It comes later than the links tell where batches were
                planned before the window was full; the rows of planned ones may have lost their handles.
        """
        sizes = np.diff(rows.table_offsets)
        handles = np.empty(len(rows), dtype=np.int64)
        is_linked = (links.back > 0) & (links.back <= batch_index - window_start)
        linked, others = np.flatnonzero(is_linked), np.flatnonzero(~is_linked)
        if linked.shape[0]:
            tables = np.repeat(np.arange(self._num_tables), sizes).take(linked)
            batches = (batch_index - links.back.take(linked)) % self._lookahead
            entries = self._starts.reshape(-1).take(batches * self._num_tables + tables)
            entries += links.place.take(linked)
            handles[linked] = self._ring.take(entries & (self._ring.shape[0] - 1))
        if others.shape[0]:
            offsets = np.searchsorted(others, rows.table_offsets).astype(np.int64)
            handles[others] = self._handles.lookup_or_add(RowList(table_offsets=offsets, ids=rows.ids.take(others)))
        self._enter(handles, rows, batch_index)
        return handles

    def _enter(self, handles: NDArray[np.int64], rows: RowList, batch_index: int) -> None:
        count = handles.shape[0]
        self._counts.append(count)
        needed = sum(self._counts)
        if needed > self._ring.shape[0]:
            self._grow(needed, held=needed - count)
        self._starts[batch_index % self._lookahead] = self._tail + rows.table_offsets[:-1]
        size = self._ring.shape[0]
        start = self._tail & (size - 1)
        first = min(count, size - start)
        self._ring[start : start + first] = handles[:first]
        self._ring[: count - first] = handles[first:]
        self._tail += count

    def _grow(self, needed: int, *, held: int) -> None:
        """A larger ring with the latest `held` handles, at the entries that their numbers give there."""
        numbers = np.arange(self._tail - held, self._tail)
        ring = np.empty(1 << (needed - 1).bit_length(), dtype=np.int64)
        ring[numbers & (ring.shape[0] - 1)] = self._ring.take(numbers & (self._ring.shape[0] - 1))
        self._ring = ring
