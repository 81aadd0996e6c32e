"""Effects of autocast."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from bagpipe.config.sections import Autocast
from bagpipe.dense.precision import AUTOCAST_DTYPES, DEFAULT_LOSS_SCALE, Precision

HALVES = (torch.bfloat16, torch.float16)


def test_every_name_of_the_configuration_has_a_dtype_and_a_scale() -> None:
    assert tuple(AUTOCAST_DTYPES) == tuple(DEFAULT_LOSS_SCALE) == get_args(Autocast)


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
