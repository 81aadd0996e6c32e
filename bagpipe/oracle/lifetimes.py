"""Lives of rows: which rows expire before a batch, and which rows of a batch are new. Pure.

    begin(batch, clock) ──> the clock of each batch
    pop_expired()       ──queue of uses, oldest first──> rows whose last use is too long ago: they are forgotten
    use(rows)           ──last use of each row─────────> which rows are new: never used, or expired since

The clock counts examples, steps or days; it never goes back. A row can expire before a batch whose clock is more than
its table's limit beyond that of its last use, but not before `LEAST_GAP` batches after it: rows of the latest batches
are in use by the engine. Memory: 4 B for each row of bounded tables, or 50 to 100 B for each live row of
others, and up to 16 B for each live row of tables with a limit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.handles import grown, make_handles
from bagpipe.oracle.plan import RowList

__all__ = ["LEAST_GAP", "RowLifetimes"]

#: Batches from the last use of a row to its expiry, at least: the planner holds rows of the batches before.
LEAST_GAP = 4
#: Entries of a queue beyond two for each live row, before stale ones are dropped.
_SPARE_ENTRIES = 1 << 16
#: Last uses are batches. Rows of earlier jobs were used by the one before the first.
_BEFORE_ALL = -1
_NOT_ALIVE = -2


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """The uses of one batch: handles of its rows, int64."""

    batch_index: int
    handles: NDArray[np.int64]


class _Queue:
    """Uses of the rows of tables with one limit, oldest first. An entry is stale if a later batch uses its row.

    Args:
        limit: in units of the clock.
        tables: bool by table number: the table has the limit.

    Attributes:
        limit, tables: as given.
        expired_to: the last batch whose rows have expired, unless a later one used them; -2: none.
        num_alive: rows that have not expired. num_entries: uses held, stale ones included.
    """

    def __init__(self, limit: float, tables: NDArray[np.bool_]) -> None:
        self.limit = limit
        self.tables = tables
        self.expired_to = _BEFORE_ALL - 1
        self.num_alive = self.num_entries = 0
        self._uses: deque[_Uses] = deque()

    def push(self, uses: _Uses, last_use: NDArray[np.int32]) -> None:
        """Add the uses of a batch. `last_use`: by handle."""
        if not uses.handles.shape[0]:
            return
        self._uses.append(uses)
        self.num_entries += uses.handles.shape[0]
        if self.num_entries > 2 * self.num_alive + _SPARE_ENTRIES:
            current = (_Uses(old.batch_index, _current(old, last_use)) for old in self._uses)
            self._uses = deque(kept for kept in current if kept.handles.shape[0])
            self.num_entries = sum(kept.handles.shape[0] for kept in self._uses)

    def pop(self, last_use: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Remove the uses up to `expired_to`. Returns the rows that no later batch has used."""
        expired = []
        while self._uses and self._uses[0].batch_index <= self.expired_to:
            uses = self._uses.popleft()
            self.num_entries -= uses.handles.shape[0]
            expired.append(_current(uses, last_use))
            self.num_alive -= expired[-1].shape[0]
        return expired


class RowLifetimes:
    """Follows the last uses of rows, batch by batch, from the first one on.

    Args:
        table_rows: by table number: ids lie in ``[0, rows)``, or None for any 64-bit id.
        limits: by table number, in units of the clock; None: its rows do not expire.
        lasting: by table number, an id that does not expire; None: none.
        every: rows expire before batches whose number is a multiple.
    """

    def __init__(
        self,
        table_rows: Sequence[int | None],
        limits: Sequence[float | None],
        lasting: Sequence[int | None],
        *,
        every: int = 1,
    ) -> None:
        self._every = every
        self._handles = make_handles(table_rows, planned_bits=64)
        self._last_use = np.full(self._handles.num_handles, _NOT_ALIVE, dtype=np.int32)
        self._num_tables = len(table_rows)
        self._lasting = tuple(lasting)
        self._queues = tuple(
            _Queue(limit, np.array([of_table == limit for of_table in limits], dtype=np.bool_))
            for limit in sorted({limit for limit in limits if limit is not None})
        )
        # Clocks of the batches from `_first` on: those before have no use in any queue.
        self._clocks: deque[float] = deque()
        self._first = _BEFORE_ALL
        self._batch_index = _BEFORE_ALL

    @property
    def num_alive(self) -> int:
        """Live rows of tables with a limit."""
        return sum(queue.num_alive for queue in self._queues)

    def know(self, rows: RowList) -> None:
        """Rows that are alive before the first batch: as old as it. `rows`: distinct; before `begin`."""
        self.use(rows)

    def begin(self, clock: float) -> None:
        """Begin the next batch. `clock`: at least that of the batch before."""
        if self._batch_index == _BEFORE_ALL:
            self._clocks.append(clock)  # of the rows that were there
        self._clocks.append(clock)
        self._batch_index += 1

    def pop_expired(self) -> RowList:
        """The rows that expire before the batch; they are alive no more. Call it before `use`.

        Returns:
            Inside a table ascending by id as an unsigned number.
        """
        batch_index, clock = self._batch_index, self._clocks[-1]
        if batch_index % self._every:
            return RowList(table_offsets=np.zeros(self._num_tables + 1, dtype=np.int64), ids=np.empty(0, np.int64))
        found = []
        for queue in self._queues:
            latest = batch_index - LEAST_GAP
            while queue.expired_to < latest and clock - self._clocks[queue.expired_to + 1 - self._first] > queue.limit:
                queue.expired_to += 1
            found += queue.pop(self._last_use)
        for _ in range(min((queue.expired_to for queue in self._queues), default=batch_index) + 1 - self._first):
            self._clocks.popleft()
            self._first += 1
        handles = np.concatenate([np.empty(0, dtype=np.int64), *found])
        self._last_use[handles] = _NOT_ALIVE
        tables, ids = self._handles.rows(handles)
        self._handles.release(handles)
        order = np.lexsort((ids.view(np.uint64), tables))
        table_offsets = np.searchsorted(tables.take(order), np.arange(self._num_tables + 1)).astype(np.int64)
        return RowList(table_offsets=table_offsets, ids=ids.take(order))

    def use(self, rows: RowList) -> NDArray[np.bool_]:
        """Note the uses of the batch.

        Args:
            rows: its distinct rows.

        Returns:
            bool ``[len(rows)]``: the row is new.
        """
        handles = self._handles.lookup_or_add(rows)
        self._last_use = grown(self._last_use, self._handles.num_handles, _NOT_ALIVE)
        is_new: NDArray[np.bool_] = self._last_use.take(handles) == _NOT_ALIVE
        self._last_use[handles] = self._batch_index
        expires = np.ones(len(rows), dtype=np.bool_)
        for (start, stop), lasting in zip(itertools.pairwise(rows.table_offsets.tolist()), self._lasting, strict=True):
            if lasting is not None:
                expires[start:stop] = rows.ids[start:stop] != lasting
        for queue in self._queues:
            is_own = np.repeat(queue.tables, np.diff(rows.table_offsets)) & expires
            queue.num_alive += int(np.count_nonzero(is_new & is_own))
            queue.push(_Uses(self._batch_index, handles[is_own]), self._last_use)
        return is_new


def _current(uses: _Uses, last_use: NDArray[np.int32]) -> NDArray[np.int64]:
    """The rows of these uses that no later batch has used."""
    current: NDArray[np.int64] = uses.handles[last_use.take(uses.handles) == uses.batch_index]
    return current
