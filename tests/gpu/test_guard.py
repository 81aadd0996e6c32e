"""The non-finite guard on a device: few launches for all tensors, and a non-finite total if any element is."""

from __future__ import annotations

import pytest
import torch

from bagpipe.training.nonfinite import _TOTALS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_total_is_finite_if_and_only_if_all_terms_are(device: str, value: float) -> None:
    total = _TOTALS[torch.device(device).type]
    shapes = [(), (1,), (300, 257), (1 << 18, 48), (1024, 399)]
    terms = [torch.randn(shape, device=device) for shape in shapes]
    terms[1].fill_(3e38)
    assert bool(total(terms).isfinite())
    for tensor in terms:
        last = tensor.view(-1)[-1:]
        before = last.clone()
        last.fill_(value)
        assert not bool(total(terms).isfinite())
        last.copy_(before)
