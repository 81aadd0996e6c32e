"""Slots of the cache: `SlotTable` tracks the row of each slot and whether it is dirty; `Slab` holds the records.

    free ──claim──> clean ──mark_dirty──> dirty ──release──> free, written back
                      ↑___________mark_clean___________|

    slot ──Slab.records(dtype)──> [weights | optimizer state | unused]        narrow records use a prefix

Threads: one lane claims slots, another marks them dirty, a third releases them. They write distinct elements of shared
arrays, because a plan uses a slot for one purpose at a time, so no lock is needed. `clear`, and `grow` above the
capacity, require idle lanes.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels.torch_kernels import ALIGN_BYTES
from bagpipe.oracle.plan import RowList

__all__ = ["FREE", "Slab", "SlotTable", "Slots", "record_bytes", "row_tables", "rows_of_tables", "table_rows"]

#: Table number of a free slot.
FREE = -1

Slots = NDArray[np.int32] | NDArray[np.int64]


def row_tables(rows: RowList) -> NDArray[np.int32]:
    """int32 ``[num_rows]``, table number of each row."""
    sizes = rows.table_offsets[1:] - rows.table_offsets[:-1]
    return np.arange(len(sizes), dtype=np.int32).repeat(sizes)


def rows_of_tables(rows: RowList, first_table: int, end_table: int) -> slice:
    """Positions of the rows of tables `first_table` to `end_table`, half open."""
    return slice(int(rows.table_offsets[first_table]), int(rows.table_offsets[end_table]))


def table_rows(rows: RowList, first_table: int, end_table: int) -> RowList:
    """The rows of tables `first_table` to `end_table`. Table numbers stay; the other tables are empty."""
    if first_table == 0 and end_table == len(rows.table_offsets) - 1:
        return rows
    part = rows_of_tables(rows, first_table, end_table)
    offsets = np.clip(rows.table_offsets - part.start, 0, part.stop - part.start)
    return RowList(table_offsets=offsets, ids=rows.ids[part])


class SlotTable:
    """The row of each of `num_slots` slots.

    Attributes:
        slot_table: int32 ``[num_slots]``, table number, or `FREE`.
        slot_id: int64 ``[num_slots]``, id; undefined for a free slot.
        dirty: bool ``[num_slots]``, updated since its insert or its last write-back.
        changed: bool ``[num_slots]``, updated since its insert or since the latest snapshot (`RowSnapshot`).
        stored_checks: uint64 ``[num_slots]``, check word of the stored row when it was fetched or last written; zero if
            there was none.
        pending, named: bool ``[num_slots]``, the snapshot has yet to copy the row; has yet to note its table and id.

    Args:
        num_slots: number of slots.
        capacity: up to so many slots `grow` can be called while lanes use other slots.
    """

    def __init__(self, num_slots: int, capacity: int = 0) -> None:
        size, zeros = max(num_slots, capacity), _pages if capacity > num_slots else np.zeros
        self._arrays: dict[str, NDArray[Any]] = {
            "slot_table": zeros(size, np.int32),
            "slot_id": zeros(size, np.int64),
            "dirty": zeros(size, np.bool_),
            "changed": zeros(size, np.bool_),
            "stored_checks": zeros(size, np.uint64),
            "pending": zeros(size, np.bool_),
            "named": zeros(size, np.bool_),
        }
        self._show(0, num_slots)

    def __len__(self) -> int:
        return len(self.slot_table)

    @property
    def num_resident(self) -> int:
        return int(np.count_nonzero(self.slot_table != FREE))

    @property
    def num_dirty(self) -> int:
        return int(np.count_nonzero(self.dirty))

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots. Rows stay in their slots."""
        before = len(self)
        if num_slots <= before:
            return
        if num_slots > len(self._arrays["slot_table"]):
            more = num_slots - len(self._arrays["slot_table"])
            self._arrays = {name: np.pad(array, (0, more)) for name, array in self._arrays.items()}
        self._show(before, num_slots)

    def _show(self, before: int, num_slots: int) -> None:
        """Make the slots from `before` to `num_slots` free ones. The arrays of lanes that hold them stay valid."""
        self._arrays["slot_table"][before:num_slots] = FREE
        parts = {name: array[:num_slots] for name, array in self._arrays.items()}
        self.slot_id: NDArray[np.int64] = parts["slot_id"]
        self.dirty: NDArray[np.bool_] = parts["dirty"]
        self.changed: NDArray[np.bool_] = parts["changed"]
        self.stored_checks: NDArray[np.uint64] = parts["stored_checks"]
        self.pending: NDArray[np.bool_] = parts["pending"]
        self.named: NDArray[np.bool_] = parts["named"]
        self.slot_table: NDArray[np.int32] = parts["slot_table"]

    def claim(self, rows: RowList, slots: Slots, checks: NDArray[np.uint64] | None = None) -> None:
        """Put rows into free slots, clean.

        Args:
            rows: k rows.
            slots: ``[k]``, their slots.
            checks: uint64 ``[k]``, their check words in the store, zero for new rows; None: all rows are new.

        Raises:
            JobError: a slot is not free.
        """
        taken = self.slot_table[slots] != FREE
        if taken.any():
            slot = int(slots[int(np.argmax(taken))])
            raise JobError(f"slot {slot} was planned for a new row but still holds {self._describe(slot)}")
        self.slot_table[slots] = row_tables(rows)
        self.slot_id[slots] = rows.ids
        self.dirty[slots] = False
        self.changed[slots] = False
        self.stored_checks[slots] = 0 if checks is None else checks

    def check(self, rows: RowList, slots: Slots) -> None:
        """Check that the slots hold exactly these rows.

        Raises:
            JobError: a slot holds another row than planned; names the first.
        """
        tables = row_tables(rows)
        wrong = (self.slot_table[slots] != tables) | (self.slot_id[slots] != rows.ids)
        if wrong.any():
            row = int(np.argmax(wrong))
            slot = int(slots[row])
            raise JobError(
                f"slot {slot} was planned to hold table {int(tables[row])} id {int(rows.ids[row])}, "
                f"but holds {self._describe(slot)}"
            )

    def release(self, slots: Slots) -> NDArray[np.bool_]:
        """Free the slots; returns which of them were dirty, bool ``[n]``."""
        was_dirty = self.dirty[slots]
        self.slot_table[slots] = FREE
        self.dirty[slots] = False
        return was_dirty

    def mark_dirty(self, slots: Slots) -> None:
        self.dirty[slots] = True
        self.changed[slots] = True

    def mark_clean(self, slots: Slots, checks: NDArray[np.uint64]) -> None:
        """Note that rows were written; `checks`: their check words."""
        self.dirty[slots] = False
        self.stored_checks[slots] = checks

    def dirty_slots(self) -> NDArray[np.int64]:
        """int64, the dirty slots ordered by (table, id), independently of slot numbers."""
        slots = np.flatnonzero(self.dirty)
        return slots[np.lexsort((self.slot_id[slots], self.slot_table[slots]))]

    def existing_slots(self) -> NDArray[np.int64]:
        """int64, the slots of rows that were trained or that the store has; the other rows have initial values still.

        Those were inserted ahead of the batch that creates them, or no gradient has reached them.
        """
        return np.flatnonzero((self.slot_table != FREE) & (self.dirty | (self.stored_checks != 0)))

    def rows_at(self, slots: Slots, num_tables: int) -> RowList:
        """The rows in `slots`, which must be ordered by table."""
        bounds = np.searchsorted(self.slot_table[slots], np.arange(num_tables + 1))
        return RowList(table_offsets=bounds.astype(np.int64), ids=self.slot_id[slots])

    def clear(self) -> None:
        """Drop every row.

        Raises:
            JobError: a dirty row would be lost.
        """
        lost = self.num_dirty
        if lost:
            raise JobError(f"{lost} updated rows would be lost: flush the cache before clearing it")
        self.slot_table.fill(FREE)

    def _describe(self, slot: int) -> str:
        table = int(self.slot_table[slot])
        return "nothing" if table == FREE else f"table {table} id {int(self.slot_id[slot])}"


def _pages(size: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Zeros that take memory when they are touched, whatever malloc keeps."""
    dtype_bytes = np.dtype(dtype).itemsize
    pages = mmap.mmap(-1, max(1, size * dtype_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype, count=size)


def record_bytes(row_bytes: int) -> int:
    """Bytes of a slot that holds a record of `row_bytes` bytes."""
    return -(-row_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Slab:
    """Row records of `num_slots` slots. A slot holds a record of any table.

    Slots start at multiples of 16 bytes, for 16-byte copies.

    Args:
        num_slots: number of slots.
        row_bytes: bytes of the widest record.
        device: device of the records.
    """

    def __init__(self, num_slots: int, row_bytes: int, device: torch.device) -> None:
        # Not zeroed: the pages of a large cache are first touched when rows enter.
        self._memory = torch.empty(num_slots, record_bytes(row_bytes), dtype=torch.uint8, device=device)

    def __len__(self) -> int:
        return int(self._memory.shape[0])

    def records(self, dtype: torch.dtype) -> Tensor:
        """``[num_slots, >= width]``: all slots as records of weights of `dtype` (`bagpipe.kernels.row_format`)."""
        return self._memory.view(dtype)

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots. Records stay in their slots. Requires idle lanes."""
        old = self._memory
        if num_slots > len(self):
            self._memory = old.new_empty(num_slots, old.shape[1])
            self._memory[: len(old)].copy_(old)
