"""Counts of the uses of rows, batch by batch: exact, or by a sketch of fixed size.

rows, uses of each in a batch ──add──> uses so far, the batch's included

BoundedUses   8 B for every row of the tables
HashedUses    50 to 100 B for every row seen, of any ids
SketchedUses  fixed: count-min (Cormode, Muthukrishnan: An improved data stream summary, 2005) with conservative
              update (Estan, Varghese: New directions in traffic measurement, 2002). It never counts too little
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError
from bagpipe.oracle.handles import DenseHandles, HashHandles, dense_sizes, grown
from bagpipe.oracle.plan import RowList
from bagpipe.types.splitmix64 import mix_rows

__all__ = ["SKETCH_ROWS", "BoundedUses", "HashedUses", "SketchedUses", "UseCounts", "make_counts", "sketch_error"]

#: Rows of a sketch, each with a hash function of its own. Of each an odd factor (multiply-shift hashing).
SKETCH_ROWS = 4
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
#: Uses of a row are counted up to here.
_MOST = (1 << 32) - 1


class UseCounts(Protocol):
    """Uses of rows so far."""

    def add(self, rows: RowList, uses: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count a batch.

        Args:
            rows: distinct rows.
            uses: int64 ``[len(rows)]``, of each in the batch.

        Returns:
            int64 ``[len(rows)]``: the uses so far, the batch's included.
        """
        ...

    def forget(self, rows: RowList) -> None:
        """Count the uses of distinct rows from 0 again.

        Raises:
            InputError: the counts are those of a sketch, which cannot forget.
        """
        ...


class BoundedUses:
    """Exact counts of bounded tables: an array by row.

    Args:
        table_rows: by table number.
    """

    def __init__(self, table_rows: tuple[int, ...]) -> None:
        self._handles = DenseHandles(table_rows)
        self._uses = np.zeros(self._handles.num_handles, dtype=np.uint32)

    def add(self, rows: RowList, uses: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `UseCounts`."""
        handles = self._handles.lookup_or_add(rows)
        total = self._uses.take(handles) + uses
        self._uses[handles] = np.minimum(total, _MOST)
        return total

    def forget(self, rows: RowList) -> None:
        """See `UseCounts`."""
        self._uses[self._handles.find(rows)] = 0


class HashedUses:
    """Exact counts of any 64-bit ids: a hash map of the rows seen, but for those forgotten."""

    def __init__(self) -> None:
        self._handles = HashHandles(planned_bits=64)
        self._uses = np.zeros(self._handles.num_handles, dtype=np.uint32)

    def add(self, rows: RowList, uses: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `UseCounts`."""
        handles = self._handles.lookup_or_add(rows)
        self._uses = grown(self._uses, self._handles.num_handles, 0)
        total = self._uses.take(handles) + uses
        self._uses[handles] = np.minimum(total, _MOST)
        return total

    def forget(self, rows: RowList) -> None:
        """See `UseCounts`."""
        handles = self._handles.find(rows)
        handles = handles[handles >= 0]
        self._uses[handles] = 0
        self._handles.release(handles)


class SketchedUses:
    """Counts that are never too small, in 16 B a cell and table: a sketch of each table's own.

    With N uses of a table so far, a count is too large by more than ``e / cells * N`` with a probability of at most
    ``exp(-SKETCH_ROWS)`` (1.8 %): see `sketch_error`. The conservative update only lowers that.

    Args:
        num_tables: tables.
        cells: of each row of a sketch, a power of two.
    """

    def __init__(self, num_tables: int, cells: int) -> None:
        self._cells = cells
        self._shift = np.uint64(64 - (cells.bit_length() - 1))
        self._sketches = np.zeros((SKETCH_ROWS, num_tables * cells), dtype=np.uint32)

    def add(self, rows: RowList, uses: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `UseCounts`."""
        counts = np.diff(rows.table_offsets)
        tables = np.repeat(np.arange(counts.shape[0], dtype=np.int64), counts)
        # The same hash whatever the other tables are.
        hashes = mix_rows(np.zeros(len(rows), dtype=np.int16), rows.ids)
        first = tables * self._cells
        if self._cells == 1:
            places = np.broadcast_to(first, (SKETCH_ROWS, len(rows)))
        else:
            places = first + ((hashes * _FACTORS[:, None]) >> self._shift).astype(np.int64)
        cells = np.take_along_axis(self._sketches, places, axis=1)
        total: NDArray[np.int64] = cells.min(axis=0) + uses
        capped = np.minimum(total, _MOST).astype(np.uint32)
        for row, row_places in zip(self._sketches, places, strict=True):
            np.maximum.at(row, row_places, capped)
        return total

    def forget(self, rows: RowList) -> None:
        """See `UseCounts`."""
        raise InputError("expected exact counts of uses where rows expire, got those of a sketch")


def make_counts(table_rows: Sequence[int | None], sketch_cells: int = 0) -> UseCounts:
    """The counts for the rows of these tables.

    Args:
        table_rows: by table number; None: any 64-bit ids.
        sketch_cells: of each row of a table's sketch, a power of two; 0: counts are exact.
    """
    if sketch_cells:
        return SketchedUses(len(table_rows), sketch_cells)
    sizes = dense_sizes(table_rows)
    return HashedUses() if sizes is None else BoundedUses(sizes)


def sketch_error(cells: int) -> tuple[float, float]:
    """Error of a count of `SketchedUses`, as a share of a table's uses so far, and the probability of a larger one."""
    return math.e / cells, math.exp(-SKETCH_ROWS)
