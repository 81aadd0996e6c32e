"""Exact sums against rational arithmetic: any order, any division among ranks, any device."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.kernels.exact_sum import NUM_LIMBS, limbs_of, squared_norms, total

FINITE = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


def float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def exact(limbs: torch.Tensor) -> Fraction:
    return sum(
        (Fraction(limb) * Fraction(2) ** (32 * k - 1126) for k, limb in enumerate(limbs[:-1].tolist())), Fraction()
    )


@given(st.lists(FINITE, max_size=30), st.integers(0, 30))
def test_limbs_hold_the_exact_sum_in_any_order(values: list[float], cut: int) -> None:
    limbs = limbs_of(float64(values))
    assert exact(limbs) == sum(map(Fraction, values))
    parts = [values[cut:], values[:cut]]
    assert torch.equal(limbs_of(float64(parts[0])) + limbs_of(float64(parts[1])), limbs)


@given(st.lists(st.floats(min_value=1e-150, max_value=1e150), min_size=1, max_size=30))
def test_the_total_is_the_sum(values: list[float]) -> None:
    assert float(total(limbs_of(float64(values)))) == pytest.approx(math.fsum(values), rel=1e-15)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_the_total_of_terms_that_are_not_finite(bad: float) -> None:
    assert math.isnan(float(total(limbs_of(float64([1.0, bad])) + limbs_of(float64([2.0])))))


def test_no_terms() -> None:
    assert limbs_of(float64([])).tolist() == [0] * NUM_LIMBS
    assert float(total(limbs_of(float64([])))) == 0.0


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 70), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 2**32))
def test_a_squared_norm_depends_on_its_vector_alone(count: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = torch.from_numpy(rng.standard_normal((count, dim))).to(dtype)
    before = vectors.clone()
    norms = squared_norms(vectors)
    assert torch.equal(vectors, before)
    np.testing.assert_allclose(norms, vectors.double().square().sum(1), rtol=1e-14)
    assert norms.tolist() == [float(squared_norms(vectors[row : row + 1])) for row in range(count)]
