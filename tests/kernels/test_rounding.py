"""Stochastic rounding compared with exact fractions, for every pattern of the deciding bits."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels.interface import RowNames
from bagpipe.kernels.rounding import StochasticRounding, open_rounding, round_stochastic
from bagpipe.types.schema import RowSchema, RowTable

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
LARGEST = {"float16": 65504.0, "bfloat16": torch.finfo(torch.bfloat16).max}
BEYOND = {"float16": 65512.0, "bfloat16": torch.finfo(torch.float32).max}
CPU = torch.device("cpu")

half_types = st.sampled_from(sorted(HALVES))
any_float = st.floats(width=32)
any_word = st.integers(-(1 << 31), (1 << 31) - 1)


def one(value: float, word: int, dtype: torch.dtype) -> float:
    weights, words = torch.tensor([value]), torch.tensor([word], dtype=torch.int32)
    rounded = round_stochastic(weights, words, dtype)
    half = rounded.to(dtype)
    assert not half.isfinite() or bits(half.float()) == bits(rounded)  # no rounding left
    return float(half)


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The nearest numbers of a half dtype at or below, and at or above, a finite value."""
    near = torch.tensor([value]).to(dtype)
    bound = torch.tensor([torch.inf], dtype=dtype)
    below = near if float(near) <= value else torch.nextafter(near, -bound)
    above = near if float(near) >= value else torch.nextafter(near, bound)
    return float(below), float(above)


@given(half_types, any_float, any_word)
def test_a_weight_becomes_a_neighbour_and_its_negative_the_opposite(name: str, value: float, word: int) -> None:
    dtype = HALVES[name]
    found = one(value, word, dtype)
    if np.isnan(value) or np.isinf(value):
        assert np.array_equal([found], [value], equal_nan=True)
        return
    assert found in neighbours(value, dtype)
    assert bits(torch.tensor([one(-value, word, dtype)])) == bits(torch.tensor([-found]))


@given(half_types, st.integers(0, (1 << 16) - 1), any_word)
def test_representable_values_are_unchanged(name: str, pattern: int, word: int) -> None:
    half = torch.tensor([pattern], dtype=torch.int32).to(torch.uint16).view(HALVES[name])
    value = float(half)
    found = one(value, word, HALVES[name])
    assert np.array_equal([found], [value], equal_nan=True)
    assert np.signbit(found) == np.signbit(value) or np.isnan(value)


# (value, deciding bits): bfloat16 drops 16 bits, float16 drops 13; below 2**-14 24 bits of a unit decide.
DECIDED = [
    ("bfloat16", 1.0 + 2.0**-23, 16),
    ("bfloat16", -3.1415927, 16),
    ("bfloat16", 1.9999999, 16),  # the upper neighbour has another exponent
    ("bfloat16", 1e-40, 16),  # a subnormal number
    ("float16", 0.01, 13),
    ("float16", -2047.3, 13),
    ("float16", 65504.0 + 8.0, 13),  # between the largest number and infinity, which is at 65536 here
]


@pytest.mark.parametrize(("name", "value", "num_bits"), DECIDED)
def test_over_all_patterns_of_the_deciding_bits_the_mean_is_the_value(name: str, value: float, num_bits: int) -> None:
    value = float(np.float32(value))
    patterns = torch.arange(1 << num_bits, dtype=torch.int64) << (32 - num_bits)
    words = (patterns - (patterns >> 31 << 32)).to(torch.int32)
    found = round_stochastic(torch.full((len(words),), value), words, HALVES[name]).double().abs()
    low, high = sorted(abs(end) for end in neighbours(value, HALVES[name]))
    exact_high = Fraction(high) if np.isfinite(high) else Fraction(65536)
    expected = (Fraction(abs(value)) - Fraction(low)) / (exact_high - Fraction(low))
    assert set(found.tolist()) == {low, float(exact_high)}
    assert Fraction(int((found > low).sum()), len(words)) == expected


@given(st.floats(0, 2.0**-14, width=32, exclude_max=True), any_word)
def test_below_its_normal_numbers_float16_counts_units(value: float, word: int) -> None:
    units = Fraction(value) * 2**24
    whole = units.numerator // units.denominator
    fraction = int((units - whole) * 2**24)  # 24 bits of it decide
    drawn = (word & 0xFFFFFFFF) >> 8
    expected = Fraction(whole + (fraction + drawn >= 2**24), 2**24)
    assert Fraction(one(value, word, torch.float16)) == expected


@pytest.mark.parametrize("name", HALVES)
def test_beyond_the_largest_number_lies_infinity_as_in_torch(name: str) -> None:
    largest, beyond = LARGEST[name], BEYOND[name]
    assert one(largest, -1, HALVES[name]) == largest
    assert {one(beyond, word, HALVES[name]) for word in (0, -1)} == {largest, torch.inf}


def schema(name: str, seed: int = 7, rounding: str = "stochastic") -> RowSchema:
    tables = (RowTable(name="a", dim=8), RowTable(name="b", dim=8))
    return RowSchema(tables=tables, optimizer="sgd", dtype=name, seed=seed, rounding=rounding)


def rounded(
    weights: Tensor, ids: Tensor, *, table: int = 0, step: int = 1, seed: int = 7, name: str = "bfloat16"
) -> Tensor:
    out = torch.empty(weights.shape, dtype=HALVES[name])
    names = RowNames(tables=torch.full((len(ids),), table, dtype=torch.int32), ids=ids)
    StochasticRounding(schema(name, seed), CPU).write(weights.clone(), out, names, step)
    return out


def test_the_bits_depend_on_seed_table_id_column_and_step_and_on_nothing_else() -> None:
    ids = torch.tensor([5, -1, 1 << 62, 9])
    weights = torch.rand(4, 8)
    whole = rounded(weights, ids)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(rounded(weights[order], ids[order]), whole[order])
    assert torch.equal(rounded(weights[:1, :3], ids[:1]), whole[:1, :3])
    same = torch.full((512, 8), 1.0 + 2.0**-8)  # halfway between two numbers
    numbers = torch.arange(512)
    base = rounded(same, numbers)
    others = [
        rounded(same, numbers, table=1),
        rounded(same, numbers, step=2),
        rounded(same, numbers, seed=8),
        rounded(same, numbers + 1),
    ]
    for other in others:
        assert 0.45 < float((other == base).float().mean()) < 0.55  # 4,096 draws: 0.5 within 0.008
    assert not torch.equal(base[:, 0], base[:, 1])


@pytest.mark.parametrize("name", HALVES)
def test_over_many_rows_the_share_that_is_rounded_up_is_the_fraction(name: str) -> None:
    low, high = neighbours(0.3, HALVES[name])
    value = torch.tensor(low + 0.3 * (high - low))
    fraction = (float(value) - low) / (high - low)
    for step in (1, 1_000_000):
        out = rounded(value.expand(4_000, 8), torch.arange(4_000) * 977, step=step, name=name)
        share = float((out.float() == high).double().mean())
        assert abs(share - fraction) < 5 * (fraction * (1 - fraction) / out.numel()) ** 0.5


def test_rows_without_names_are_not_rounded_stochastically() -> None:
    with pytest.raises(JobError, match="needs the names of the rows"):
        open_rounding(schema("float16"), CPU).write(torch.zeros(1, 8), torch.zeros(1, 8), None, 1)


def test_to_the_nearest_is_torchs_own_conversion() -> None:
    weights = torch.randn(64, 8)
    out = torch.empty(64, 8, dtype=torch.float16)
    rounding = open_rounding(schema("float16", rounding="nearest"), CPU)
    assert not rounding.needs_names
    rounding.write(weights, out, None, 1)
    assert torch.equal(out, weights.to(torch.float16))
