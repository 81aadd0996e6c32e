"""Row records in and out of their slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.slab import Scratch, Slab
from bagpipe.kernels.torch_kernels import gather, scatter

CPU = torch.device("cpu")


@given(
    width=st.integers(1, 19),
    narrower=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    num_rows=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_what_goes_in_comes_out(width: int, narrower: int, dtype: torch.dtype, num_rows: int, seed: int) -> None:
    """Any width, 16-byte multiple or not; other slots and the rest of a wider record stay untouched."""
    generator = torch.Generator().manual_seed(seed)
    slab = Slab(12, width, dtype, CPU)
    everything = torch.randn(12, width, dtype=dtype, generator=generator)
    scatter(slab.records, torch.arange(12), everything)
    slots = torch.randperm(12, generator=generator)[:num_rows]
    part = max(1, width - narrower)
    rows = torch.randn(num_rows, part, dtype=dtype, generator=generator)
    scatter(slab.records, slots, rows)
    everything[slots, :part] = rows
    assert torch.equal(gather(slab.records, slots, part), rows)
    assert torch.equal(gather(slab.records, torch.arange(12), width), everything)


def test_bits_survive() -> None:
    """Signalling and negative NaNs, infinities, negative zero, denormals: a copy is a copy."""
    words = torch.tensor([0x7FA00001, -0x5FFFFF, 0x7F800000, -0x80000000, 1, -0x7FFFFFFF, 0, 0x3F800000])
    row = words.to(torch.int32).view(torch.float32).unsqueeze(0)
    slab = Slab(3, 8, torch.float32, CPU)
    scatter(slab.records, torch.tensor([1]), row)
    assert torch.equal(gather(slab.records, torch.tensor([1]), 8).view(torch.int32), row.view(torch.int32))


def test_growing_keeps_records() -> None:
    slab = Slab(2, 3, torch.float32, CPU)
    scatter(slab.records, torch.tensor([1]), torch.tensor([[1.0, 2.0, 3.0]]))
    slab.grow(5)
    slab.grow(4)
    assert len(slab) == 5
    assert gather(slab.records, torch.tensor([1]), 3).tolist() == [[1.0, 2.0, 3.0]]


def test_gather_into_scratch() -> None:
    slab = Slab(4, 6, torch.float64, CPU)
    scatter(slab.records, torch.arange(4), torch.arange(24, dtype=torch.float64).view(4, 6))
    scratch = Scratch(torch.float64, CPU)
    first = gather(slab.records, torch.tensor([3, 0]), 4, scratch.take(2, 4))
    assert first.tolist() == [[18.0, 19.0, 20.0, 21.0], [0.0, 1.0, 2.0, 3.0]]
    again = scratch.take(1, 5)
    assert again.data_ptr() == first.data_ptr()  # the same memory, as long as it is large enough
    assert scratch.take(100, 5).shape == (100, 5)
    assert scratch.take(0, 5).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_slots(dtype: torch.dtype) -> None:
    assert len(Slab(0, 5, dtype, CPU)) == 0
