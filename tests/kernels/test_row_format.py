from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from bagpipe.errors import JobError
from bagpipe.kernels.initialization import TORCH_DTYPE, initial_weights
from bagpipe.kernels.interface import Bags, Gradients, RowStep, RowView
from bagpipe.kernels.row_decay import set_row_steps
from bagpipe.kernels.row_format import first_not_finite, host_words, open_row_format, split_record
from bagpipe.kernels.segment_sum import SegmentSum
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.types.schema import FROZEN, OPTIMIZER_STATE_WIDTH, ROW_TYPES, RowSchema, RowTable, base_optimizer

CPU = torch.device("cpu")
HALVES = [name for name, row_type in ROW_TYPES.items() if row_type.is_half]


def schema_of(
    dtype: str, optimizer: str = "adagrad", dim: int = 5, rounding: str = "nearest", *, own: str | None = None
) -> RowSchema:
    """`own`: the optimizer of the table, if it is not the schema's."""
    table = RowTable(name="t", dim=dim, optimizer=own)
    return RowSchema(tables=(table,), optimizer=optimizer, dtype=dtype, rounding=rounding)


@given(
    dtype=st.sampled_from(sorted(ROW_TYPES)),
    optimizer=st.sampled_from(sorted({*OPTIMIZER_STATE_WIDTH} - {FROZEN})),
    own=st.none() | st.sampled_from(sorted(OPTIMIZER_STATE_WIDTH)),
    dim=st.integers(1, 9),
    num_rows=st.integers(0, 3),
)
def test_unpacked_and_packed_records_have_equal_bits(
    dtype: str, optimizer: str, own: str | None, dim: int, num_rows: int
) -> None:
    assume(dtype in ("float32", "float64") or not base_optimizer(own or optimizer)[1])
    schema = schema_of(dtype, optimizer, dim, own=own)
    row_format = open_row_format(schema, CPU)
    generator = torch.Generator().manual_seed(dim)
    rows = torch.zeros(num_rows, row_format.width(dim, own), dtype=TORCH_DTYPE[dtype])
    for part in split_record(rows, schema, dim, own):
        part.copy_(torch.randn(part.shape, generator=generator))
    before = host_words(rows).tobytes()
    values = row_format.unpack(rows, dim, own)
    assert values.shape == (num_rows, dim + OPTIMIZER_STATE_WIDTH[own or optimizer](dim))
    assert values.dtype == TORCH_DTYPE[schema.row_type.compute]
    row_format.pack(values, rows, dim, None, 1, own)
    assert host_words(rows).tobytes() == before
    assert len(before) == num_rows * schema.row_bytes(0)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_bytes_of_a_half_record(dtype: str) -> None:
    """Two-byte weights, a padding zero, four-byte state: all little-endian."""
    schema = schema_of(dtype, "adam", dim=3)
    rows = torch.zeros(1, schema.row_width(0), dtype=TORCH_DTYPE[dtype])
    weights, state = split_record(rows, schema, 3)
    weights.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
    state.copy_(torch.arange(1, 7))
    words = {"float16": [0x3C00, 0xC000, 0x3800], "bfloat16": [0x3F80, 0xC000, 0x3F00]}[dtype]
    expected = np.array([*words, 0], "<u2").tobytes() + np.arange(1, 7, dtype="<f4").tobytes()
    assert host_words(rows).astype("<u2").tobytes() == expected


@pytest.mark.parametrize("dtype", HALVES)
def test_half_rows_begin_at_the_nearest_of_the_initial_values(dtype: str) -> None:
    schema = schema_of(dtype)
    records = torch.full((8, schema.row_width(0)), torch.nan, dtype=TORCH_DTYPE[dtype])
    ids = torch.tensor([7, -3, 1 << 40])
    slots = torch.tensor([6, 0, 2])
    TorchKernels(schema, CPU).initialise(records, slots, torch.zeros(3, dtype=torch.int64), ids, 5)
    weights, state = split_record(records.index_select(0, slots), schema, 5)
    assert torch.equal(weights, initial_weights(schema.tables[0], ids.numpy(), seed=0).to(weights.dtype))
    assert torch.equal(weights, initial_weights(schema.tables[0], ids.numpy(), seed=0, dtype=dtype))
    assert not host_words(records)[slots.numpy(), 5:].any()
    assert not state.any()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_rows_are_pooled_as_the_float32_rows_of_the_same_values(dtype: str) -> None:
    weights = torch.randn(6, 8).to(TORCH_DTYPE[dtype])
    indices, offsets = torch.tensor([0, 5, 5, 2, 1], dtype=torch.int32), torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    for bags in (
        Bags(indices=indices, offsets=None, factors=None, mean=False),
        Bags(indices=indices, offsets=offsets, factors=None, mean=False),
        Bags(indices=indices, offsets=offsets, factors=None, mean=True),
        Bags(indices=indices, offsets=offsets, factors=torch.rand(5), mean=False),
    ):
        half, single = (
            TorchKernels(schema_of(name, "sgd", 6), CPU).pool(RowView(records=rows, slot_index=None, dim=6), bags)
            for name, rows in ((dtype, weights), ("float32", weights.float()))
        )
        assert half.dtype == torch.float32
        assert torch.equal(half, single)


def test_stochastic_rounding_requires_names() -> None:
    schema = schema_of("bfloat16", "sgd", dim=4, rounding="stochastic")
    kernels = TorchKernels(schema, CPU)
    assert kernels.needs_names
    assert not TorchKernels(schema_of("bfloat16"), CPU).needs_names
    segment_sum = SegmentSum(
        row_starts=np.array([0, 1], np.int32),
        row_offsets=torch.tensor([0, 1], dtype=torch.int32),
        sources=torch.tensor([0], dtype=torch.int32),
        coefficients=None,
        occurrences=None,
    )
    terms = [Gradients(vectors=torch.ones(1, 4), segment_sum=segment_sum)]
    with pytest.raises(JobError, match="needs the names of the rows"):
        kernels.update(
            torch.zeros(1, 8, dtype=torch.bfloat16), torch.tensor([0]), terms, RowStep(lr=0.1, eps=0.0, step=1)
        )


@pytest.mark.parametrize("dtype", sorted(ROW_TYPES))
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
def test_the_first_record_that_is_not_finite_is_found(dtype: str, optimizer: str) -> None:
    schema, dim = schema_of(dtype, optimizer), 5
    records = torch.zeros(4, open_row_format(schema, CPU).width(dim), dtype=TORCH_DTYPE[dtype])
    weights, state = split_record(records, schema, dim)
    largest = [torch.finfo(part.dtype).max for part in (weights, state)]
    for part, value in zip((weights, state), largest, strict=True):
        part[::2], part[1::2] = value, -value
    assert first_not_finite(host_words(records), dtype, dim, optimizer) is None
    assert first_not_finite(host_words(records[:0]), dtype, dim, optimizer) is None
    for part, value in zip((weights, state), largest, strict=True):
        for bad in (float("nan"), -float("nan"), float("inf"), float("-inf")) if part.numel() else ():
            part[2, -1] = part[3, 0] = bad
            assert first_not_finite(host_words(records), dtype, dim, optimizer) == 2
            part[2, -1] = part[3, 0] = value


@pytest.mark.parametrize("optimizer", ["sgd_decayed", "adam_l2"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_step_of_a_row_that_decays_is_finite(dtype: str, optimizer: str) -> None:
    schema, dim = schema_of(dtype, optimizer), 5
    records = torch.zeros(2, open_row_format(schema, CPU).width(dim), dtype=TORCH_DTYPE[dtype])
    set_row_steps(records, records.shape[1] - 1, 2_000_000_000)
    assert first_not_finite(host_words(records), dtype, dim, optimizer) is None
