"""Parameters that every rank has: what is stepped, looked at and forgotten."""

from __future__ import annotations

import torch
from torch import nn

from bagpipe.training.dense_parameters import WholeParameters


def test_whole_parameters_are_stepped_by_their_gradients() -> None:
    model = nn.Linear(2, 1)
    held = WholeParameters(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(1, 2)
    assert [name for name, _ in held.gradients()] == ["weight"]
    assert held.reduce(is_bad=None) is False
    held.step()
    held.clear()
    assert torch.equal(model.weight, before - 1)
    assert not list(held.gradients())
