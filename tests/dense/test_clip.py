"""Limits of gradients equal torch's. In whole jobs: `tests/system/test_gradient_limits.py`."""

from __future__ import annotations

import pytest
import torch

from bagpipe.dense.clip import NO_CLIP, Clip


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (3, 5, 2)]
    for parameter in made[:2]:
        parameter.grad = torch.randn(len(parameter), generator=generator, dtype=torch.float64)
    return made


def gradients_after(clip: Clip) -> list[list[float]]:
    made = parameters()
    clip.apply(made)
    return [parameter.grad.tolist() for parameter in made if parameter.grad is not None]


@pytest.mark.parametrize("norm", [0.01, 1.0, 100.0])
def test_the_norm_is_torchs(norm: float) -> None:
    theirs = parameters()
    torch.nn.utils.clip_grad_norm_(theirs, norm)
    expected = [parameter.grad.tolist() for parameter in theirs if parameter.grad is not None]
    assert gradients_after(Clip(norm=norm)) == expected


@pytest.mark.parametrize("norm", [0.01, 1.0, 100.0])
def test_rows_are_limited_with_parameters_or_alone(norm: float) -> None:
    row = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    unlimited = torch.tensor([0.5, -2.0, 0.0, 1.0], dtype=torch.float64)
    squares = torch.tensor(5.25, dtype=torch.float64)
    row.grad = unlimited.clone()
    theirs = [*parameters(), row]
    total = torch.nn.utils.clip_grad_norm_(theirs, norm)
    ours = parameters()
    together = Clip(norm=norm, scope="all").apply(ours, squares)
    assert together is not None
    assert together.row_factor is not None
    torch.testing.assert_close(together.norm, total, rtol=1e-12, atol=0)
    for found, plain in zip(ours, theirs[:-1], strict=True):
        torch.testing.assert_close(found.grad, plain.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(unlimited * together.row_factor, row.grad, rtol=1e-12, atol=0)

    row.grad = unlimited.clone()
    total = torch.nn.utils.clip_grad_norm_([row], norm)
    ours = parameters()
    alone = Clip(norm=norm, scope="rows").apply(ours, squares)
    assert alone is not None
    assert alone.row_factor is not None
    torch.testing.assert_close(alone.norm, total, rtol=1e-12, atol=0)
    torch.testing.assert_close(unlimited * alone.row_factor, row.grad, rtol=1e-12, atol=0)
    assert [p.grad.tolist() for p in ours if p.grad is not None] == gradients_after(NO_CLIP)


def test_the_value_is_torchs() -> None:
    theirs = parameters()
    torch.nn.utils.clip_grad_value_(theirs, 0.3)
    assert gradients_after(Clip(value=0.3)) == [p.grad.tolist() for p in theirs if p.grad is not None]


def test_no_limit_changes_nothing() -> None:
    assert gradients_after(NO_CLIP) == [p.grad.tolist() for p in parameters() if p.grad is not None]
    NO_CLIP.apply([])
    Clip(norm=1.0, value=1.0).apply([torch.nn.Parameter(torch.zeros(2))])
