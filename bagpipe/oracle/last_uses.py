"""Last uses of rows: how long ago the batches of a log used each row. Pure.

    batch ──clock, distinct rows──> use ──last batch of each row, clock of each batch──┐
    ids of a table, clock now ────> ages <─────────────────────────────────────────────┘

Nothing is forgotten, unlike in `RowLifetimes`, which follows uses to let rows expire. Memory: 4 B for each row of
bounded tables, or 50 to 100 B for each used row of others, and 8 B for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.handles import grown, make_handles
from bagpipe.oracle.lifetimes import LEAST_GAP
from bagpipe.oracle.plan import RowList

__all__ = ["LastUses"]

_NEVER = -1


class LastUses:
    """The last use of every row that batches have used so far. Batches come in order, from the first one on.

    Args:
        table_rows: by table number: ids lie in ``[0, rows)``, or None for any 64-bit id.
    """

    def __init__(self, table_rows: Sequence[int | None]) -> None:
        self._table_rows = tuple(table_rows)
        self._handles = make_handles(table_rows, planned_bits=64)
        self._last_batch = np.full(self._handles.num_handles, _NEVER, dtype=np.int32)
        self._clocks: list[float] = []

    @property
    def num_batches(self) -> int:
        """Batches so far."""
        return len(self._clocks)

    def use(self, rows: RowList, clock: float) -> None:
        """Note the uses of the next batch.

        Args:
            rows: its distinct rows, by table number.
            clock: of the batch; at least that of the batch before.
        """
        handles = self._handles.lookup_or_add(rows)
        self._last_batch = grown(self._last_batch, self._handles.num_handles, _NEVER)
        self._last_batch[handles] = len(self._clocks)
        self._clocks.append(clock)

    def is_used(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Bool ``[n]``: a batch has used the row. `ids`: int64 ``[n]``, distinct."""
        used: NDArray[np.bool_] = self._of_rows(table, ids) != _NEVER
        return used

    def ages(self, table: int, ids: NDArray[np.int64], now: float) -> NDArray[np.float64]:
        """Time since the last use of rows of a table.

        Args:
            table: number of the table.
            ids: int64 ``[n]``, distinct, of the table.
            now: the clock, at least that of the last batch.

        Returns:
            float64 ``[n]``, in units of the clock. A row that no batch has used is as old as the first batch.
        """
        clocks = np.array(self._clocks or [now], dtype=np.float64)
        ages: NDArray[np.float64] = now - clocks.take(np.maximum(self._of_rows(table, ids), 0))
        return ages

    def is_kept(self, table: int, ids: NDArray[np.int64], now: float, limit: float) -> NDArray[np.bool_]:
        """The rows of a table that do not expire by a limit now, as `RowLifetimes` counts.

        Args:
            table, ids, now: as in `ages`.
            limit: in units of the clock.

        Returns:
            bool ``[n]``: used at most `limit` ago, or by one of the last `LEAST_GAP` - 1 batches.
        """
        batches = self._of_rows(table, ids)
        is_recent = (batches != _NEVER) & (len(self._clocks) - batches < LEAST_GAP)
        kept: NDArray[np.bool_] = (self.ages(table, ids, now) <= limit) | is_recent
        return kept

    def _of_rows(self, table: int, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """int32 ``[n]``: the last batch that used each row; `_NEVER` if none did."""
        table_offsets = np.zeros(len(self._table_rows) + 1, dtype=np.int64)
        table_offsets[table + 1 :] = ids.shape[0]
        handles = self._handles.find(RowList(table_offsets=table_offsets, ids=ids))
        found = np.full(ids.shape[0], _NEVER, dtype=np.int32)
        known = np.flatnonzero(handles >= 0)
        found[known] = self._last_batch.take(handles.take(known))
        return found
