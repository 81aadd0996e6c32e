"""`LayerFactors`: averages, damping and inverses of one layer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.dense.precondition.factors import BatchSums, LayerFactors, damping_ratio
from bagpipe.errors import InputError


def sums_of(seed: int, num_examples: int, a: int = 4, g: int = 3) -> BatchSums:
    generator = torch.Generator().manual_seed(seed)
    sums = BatchSums.zeros(a, g, torch.empty(0, dtype=torch.float64))
    sums.add_inputs(torch.randn(num_examples, a - 1, generator=generator, dtype=torch.float64), has_bias=True)
    sums.add_outputs(torch.randn(num_examples, g, generator=generator, dtype=torch.float64), 2.0)
    sums.counts[1] += num_examples
    return sums


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), damping=st.sampled_from([1e-4, 0.01, 1.0]), num_examples=st.integers(1, 9))
def test_the_gradient_times_the_inverse_of_the_kronecker_product(seed: int, damping: float, num_examples: int) -> None:
    factors = LayerFactors("layer", decay=0.9, damping=damping)
    for batch in range(3):
        factors.fold(sums_of(seed + batch, num_examples))
    factors.invert()
    a, g = factors.factor_a, factors.factor_g
    assert a is not None
    assert g is not None
    ratio = damping_ratio(a, g).item()
    damped_a = a + ratio * damping**0.5 * torch.eye(4, dtype=a.dtype)
    damped_g = g + damping**0.5 / ratio * torch.eye(3, dtype=a.dtype)
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = torch.linalg.solve(torch.kron(damped_g, damped_a), gradient.reshape(-1)).view(3, 4)
    torch.testing.assert_close(factors.precondition(gradient), expected, rtol=1e-8, atol=1e-10)


def test_the_first_batch_is_the_average_and_one_without_examples_changes_nothing() -> None:
    factors = LayerFactors("layer", decay=0.75, damping=0.1)
    gradient = torch.ones(3, 4, dtype=torch.float64)
    factors.invert()
    assert factors.precondition(gradient) is gradient
    first, second = sums_of(1, 5), sums_of(2, 5)
    factors.fold(first)
    assert factors.factor_a is not None
    assert torch.equal(factors.factor_a, first.inputs / 5)
    factors.fold(second)
    torch.testing.assert_close(factors.factor_a, 0.75 * first.inputs / 5 + 0.25 * second.inputs / 5)
    before = factors.factor_a.clone()
    factors.fold(BatchSums.zeros(4, 3, before))
    assert torch.equal(factors.factor_a, before)


def test_traces_of_zero_share_the_damping_evenly() -> None:
    assert damping_ratio(torch.eye(3), torch.zeros(2, 2)).item() == 1.0
    assert damping_ratio(4 * torch.eye(3), torch.eye(2)).item() == 2.0


def test_what_cannot_be_inverted() -> None:
    singular = LayerFactors("top", decay=0.9, damping=0.0)
    singular.fold(sums_of(0, 2))
    with pytest.raises(InputError, match=r"factor A of layer top, of dimension 4, is singular with damping 0"):
        singular.invert()
    broken = LayerFactors("top", decay=0.9, damping=0.1)
    bad = sums_of(0, 5)
    bad.inputs[0, 0] = float("nan")
    broken.fold(bad)
    broken.invert()  # the check of gradients says what is wrong
    assert not bool(torch.isfinite(broken.precondition(torch.ones(3, 4, dtype=torch.float64))).all())
