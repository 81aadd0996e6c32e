"""Bookkeeping of slots, and records in a slab."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.slots import FREE, Slab, SlotTable, row_tables, rows_of_tables, table_rows
from bagpipe.errors import JobError
from bagpipe.kernels.torch_kernels import gather, scatter
from tests.cache.plans import row_list

CPU = torch.device("cpu")


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
    assert table.existing_slots().tolist() == [0, 2]
    table.mark_clean(ints(0), np.array([7], dtype=np.uint64))
    assert table.existing_slots().tolist() == [0, 2]
    table.check(rows, slots)
    assert table.release(slots).tolist() == [False, False, True]
    assert not len(table.existing_slots())
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
    table.mark_clean(ints(1), np.array([7], np.uint64))
    assert table.stored_checks[1] == 7
    table.clear()
    assert table.num_resident == 0


def test_rows_of_tables_keep_their_table_numbers() -> None:
    rows = row_list([np.array([4, 5]), np.array([1]), np.array([7, 8, 9])])
    assert rows_of_tables(rows, 1, 3) == slice(2, 6)
    part = table_rows(rows, 1, 2)
    assert (part.table_offsets.tolist(), part.ids.tolist()) == ([0, 0, 1, 1], [1])


@given(
    width=st.integers(1, 19),
    narrower=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    num_rows=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_records_round_trip(width: int, narrower: int, dtype: torch.dtype, num_rows: int, seed: int) -> None:
    """Any width, 16-byte multiple or not; other slots and the rest of wider records stay unchanged."""
    generator = torch.Generator().manual_seed(seed)
    slab = Slab(12, width * dtype.itemsize, CPU)
    records = slab.records(dtype)
    everything = torch.randn(12, width, dtype=dtype, generator=generator)
    scatter(records, torch.arange(12), everything)
    slots = torch.randperm(12, generator=generator)[:num_rows]
    part = max(1, width - narrower)
    rows = torch.randn(num_rows, part, dtype=dtype, generator=generator)
    scatter(records, slots, rows)
    everything[slots, :part] = rows
    assert torch.equal(gather(records, slots, part), rows)
    assert torch.equal(gather(records, torch.arange(12), width), everything)


def test_bits_survive() -> None:
    """Signalling and negative NaNs, infinities, negative zero, denormals keep their bits."""
    words = torch.tensor([0x7FA00001, -0x5FFFFF, 0x7F800000, -0x80000000, 1, -0x7FFFFFFF, 0, 0x3F800000])
    row = words.to(torch.int32).view(torch.float32).unsqueeze(0)
    records = Slab(3, 32, CPU).records(torch.float32)
    scatter(records, torch.tensor([1]), row)
    assert torch.equal(gather(records, torch.tensor([1]), 8).view(torch.int32), row.view(torch.int32))


def test_slots_hold_records_of_several_dtypes() -> None:
    slab = Slab(4, 36, CPU)
    rows = {
        dtype: torch.tensor([[1.5, -2.0, 3.25]], dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }
    for slot, (dtype, row) in enumerate(rows.items()):
        scatter(slab.records(dtype), torch.tensor([slot]), row)
        assert slab.records(dtype).stride(0) * dtype.itemsize == 48
    for slot, (dtype, row) in enumerate(rows.items()):
        assert torch.equal(gather(slab.records(dtype), torch.tensor([slot]), 3), row)


def test_growing_keeps_records() -> None:
    slab = Slab(2, 12, CPU)
    scatter(slab.records(torch.float32), torch.tensor([1]), torch.tensor([[1.0, 2.0, 3.0]]))
    slab.grow(5)
    slab.grow(4)
    assert len(slab) == 5
    assert gather(slab.records(torch.float32), torch.tensor([1]), 3).tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_slots(dtype: torch.dtype) -> None:
    slab = Slab(0, 20, CPU)
    assert len(slab) == len(slab.records(dtype)) == 0
