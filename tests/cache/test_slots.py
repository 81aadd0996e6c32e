"""Residency bookkeeping."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.cache.slots import FREE, SlotTable, row_tables, rows_of_tables, table_rows
from bagpipe.errors import JobError
from tests.cache.plans import row_list


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_life_of_a_row() -> None:
    table = SlotTable(6)
    rows = row_list([ints(10, 11), ints(), ints(10)])
    slots = ints(4, 0, 2).astype(np.int32)
    assert row_tables(rows).tolist() == [0, 0, 2]
    table.claim(rows, slots)
    assert table.slot_table.tolist() == [0, FREE, 2, FREE, 0, FREE]
    assert (table.num_resident, table.num_dirty) == (3, 0)
    table.mark_dirty(slots[1:])
    assert table.dirty_slots().tolist() == [0, 2]  # (table 0, id 11), (table 2, id 10)
    assert table.rows_at(table.dirty_slots(), 3).table_offsets.tolist() == [0, 1, 1, 2]
    table.check(rows, slots)
    assert table.release(slots).tolist() == [False, True, True]
    assert (table.num_resident, table.num_dirty) == (0, 0)


def test_growing_keeps_rows() -> None:
    table = SlotTable(1)
    table.claim(row_list([ints(5)]), ints(0))
    table.mark_dirty(ints(0))
    table.grow(3)
    table.grow(2)
    assert len(table) == 3
    assert table.slot_table.tolist() == [0, FREE, FREE]
    assert table.num_dirty == 1


def test_plan_and_cache_disagree() -> None:
    table = SlotTable(4)
    table.claim(row_list([ints(5), ints(6)]), ints(1, 2))
    with pytest.raises(JobError, match="slot 2 was planned for a new row but still holds table 1 id 6"):
        table.claim(row_list([ints(7), ints()]), ints(2))
    with pytest.raises(JobError, match="slot 2 was planned to hold table 1 id 7, but holds table 1 id 6"):
        table.check(row_list([ints(), ints(7)]), ints(2))
    with pytest.raises(JobError, match="slot 3 was planned to hold table 0 id 5, but holds nothing"):
        table.check(row_list([ints(5), ints()]), ints(3))


def test_clear_loses_nothing() -> None:
    table = SlotTable(2)
    table.claim(row_list([ints(5)]), ints(1))
    table.mark_dirty(ints(1))
    with pytest.raises(JobError, match="1 updated rows would be lost"):
        table.clear()
    table.mark_clean(ints(1))
    table.clear()
    assert table.num_resident == 0


def test_rows_of_tables_keep_their_table_numbers() -> None:
    rows = row_list([np.array([4, 5]), np.array([1]), np.array([7, 8, 9])])
    assert rows_of_tables(rows, 1, 3) == slice(2, 6)
    part = table_rows(rows, 1, 2)
    assert (part.table_offsets.tolist(), part.ids.tolist()) == ([0, 0, 1, 1], [1])
