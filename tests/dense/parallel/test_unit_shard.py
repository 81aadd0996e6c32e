"""An elementwise optimizer steps segments of a tensor as it steps the tensor."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from tests.dense.parallel.test_sharded import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_of_segments_is_a_step_of_the_tensor(name: str, dtype: torch.dtype) -> None:
    """Wherever the cuts are: torch's elementwise steps do not depend on an element's place."""
    generator = torch.Generator().manual_seed(3)
    length, cuts = 40_003, [0, 7, 64, 999, 20_011, 40_003]
    start = torch.randn(length, generator=generator, dtype=dtype)
    whole = nn.Parameter(start.clone())
    segments = [nn.Parameter(start.clone()[a:b]) for a, b in itertools.pairwise(cuts)]
    optimizers = [OPTIMIZERS[name]([whole]), OPTIMIZERS[name](segments)]
    for _ in range(5):
        gradient = torch.randn(length, generator=generator, dtype=dtype)
        whole.grad = gradient * torch.rand(length, generator=generator, dtype=dtype).pow(8)
        for segment, (a, b) in zip(segments, itertools.pairwise(cuts), strict=True):
            segment.grad = whole.grad[a:b].clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(torch.cat([segment.detach() for segment in segments]), whole.detach())
