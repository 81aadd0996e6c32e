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


def test_parameters_that_a_run_gets_on_its_way_are_looked_at() -> None:
    """A user can give the model and its optimizer others between two batches, and freeze some."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = WholeParameters(model, optimizer)
    held.begin()
    model.append(nn.Linear(1, 1, bias=False))
    optimizer.add_param_group({"params": [model[2].weight]})
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert [name for name, _ in held.gradients()] == ["1.weight", "1.bias", "2.weight"]
    model[1].bias = nn.Parameter(torch.zeros(1))
    optimizer.param_groups[0]["params"] = [*model[0].parameters(), *model[1].parameters()]
    assert any(parameter is model[1].bias for parameter in held.stepped)
