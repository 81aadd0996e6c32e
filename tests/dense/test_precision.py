"""What autocast changes and what it does not; that a loss scale leaves no trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bagpipe.config_rules import AUTOCAST
from bagpipe.dense.precision import AUTOCAST_DTYPES, DEFAULT_LOSS_SCALE, Precision

HALVES = (torch.bfloat16, torch.float16)


def test_every_name_of_the_configuration_has_a_dtype_and_a_scale() -> None:
    assert tuple(AUTOCAST_DTYPES) == tuple(DEFAULT_LOSS_SCALE) == AUTOCAST


@pytest.mark.parametrize("dtype", HALVES)
def test_products_are_half_and_gradients_are_not(dtype: torch.dtype) -> None:
    layer, vectors = nn.Linear(8, 4), torch.randn(3, 8, requires_grad=True)
    with Precision(autocast_dtype=dtype).autocast():
        assert not torch.is_autocast_cache_enabled()
        out = layer(vectors)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert {tensor.grad.dtype for tensor in (vectors, *layer.parameters()) if tensor.grad is not None} == {
        torch.float32
    }


def test_without_autocast_nothing_is_entered() -> None:
    with Precision().autocast():
        assert not torch.is_autocast_enabled("cpu")


@settings(max_examples=30)
@given(exponent=st.integers(1, 24), seed=st.integers(0, 1000), examples=st.integers(1, 9))
def test_a_scale_divided_out_leaves_the_same_bits(exponent: int, seed: int, examples: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    layers = nn.Sequential(nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 1))
    vectors = torch.randn(examples, 5, generator=draw, requires_grad=True)
    tensors = [vectors, *layers.parameters()]
    found = []
    for precision in (Precision(), Precision(loss_scale=2.0**exponent)):
        loss = layers(vectors).square().sum() / examples
        loss.backward(precision.root_gradient(loss))
        precision.unscale_parameters(tensors)
        found.append([tensor.grad for tensor in tensors])
        for tensor in tensors:
            tensor.grad = None
    assert all(torch.equal(plain, scaled) for plain, scaled in zip(*found, strict=True))


def test_gradients_of_rows_are_divided_in_new_memory() -> None:
    """Two runs may hold one tensor: dividing it in place would do so twice."""
    shared = torch.full((2, 3), 8.0)
    runs = [SimpleNamespace(gradients=[(shared, None)]), SimpleNamespace(gradients=[(shared, torch.ones(2))])]
    Precision(loss_scale=4).unscale_rows(cast(Any, runs))
    assert torch.equal(shared, torch.full((2, 3), 8.0))
    assert all(torch.equal(run.gradients[0][0], torch.full((2, 3), 2.0)) for run in runs)
    assert runs[1].gradients[0][1] is not None
    Precision().unscale_rows(cast(Any, runs))
    assert all(torch.equal(run.gradients[0][0], torch.full((2, 3), 2.0)) for run in runs)


def test_a_scale_is_named_where_it_may_be_the_cause() -> None:
    assert Precision().hint == ""
    assert "run.loss_scale = 4096" in Precision(loss_scale=4096).hint
