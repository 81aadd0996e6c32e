"""Compiled code called with stored weights: the values of torch's operators, and one compilation for all weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense import compiler as compiled
from bagpipe.dense.compiler import Compiler
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import DenseStage
from bagpipe.dense.versioned_call import CallWeights, versioned_call


class Layers(nn.Module):
    """A weight in two places, a frozen one, an output without a gradient, and one that is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.second.weight = self.first.weight
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.last(self.second(torch.relu(self.first(x)))), x > 0, x


def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Receives what is compiled."""
    found: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "BACKEND", backend)
    return found


def computed(
    module: nn.Module, inner: nn.Module, x: Tensor, forward: Sequence[Tensor] | None, backward: Sequence[Tensor] | None
) -> list[Tensor]:
    """Outputs, and gradients of the input and the parameters."""
    parameters = [each for each in inner.parameters() if each.requires_grad]
    weights = CallWeights(parameters=parameters, forward=forward, backward=backward)
    outputs = versioned_call(module, (x,), weights)
    assert [output.requires_grad for output in outputs] == [True, False, True]
    torch.autograd.backward(outputs[0].square().sum() + outputs[2].sum())
    found = [*outputs, *(each.grad for each in (x, *parameters) if each.grad is not None)]
    assert len(found) == len(outputs) + 1 + len(parameters)
    for each in (x, *parameters):
        each.grad = None
    return found


def test_one_compilation_serves_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = graphs(monkeypatch)
    torch.manual_seed(1)
    inner = Layers().double()
    stage = DenseStage(inner, Precision(), Compiler())
    x = torch.randn(4, 3).double().requires_grad_()
    one, two = ([torch.randn_like(each) for each in inner.parameters() if each.requires_grad] for _ in range(2))
    for forward, backward in ((None, None), (one, one), (two, two), (one, two), (None, one), (two, None)):
        expected = computed(inner, inner, x, forward, backward)
        got = computed(stage, inner, x, forward, backward)
        assert all(torch.equal(left, right) for left, right in zip(got, expected, strict=True))
    assert len(found) == 1
    assert all(isinstance(each, nn.Parameter) and each.is_leaf for each in inner.parameters())


def test_an_error_leaves_the_weights_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs(monkeypatch)
    inner = Layers()
    before = dict(inner.named_parameters())
    stored = [parameter.detach().clone() for parameter in inner.parameters() if parameter.requires_grad]
    weights = CallWeights(parameters=[each for each in inner.parameters() if each.requires_grad], forward=stored)
    with pytest.raises(RuntimeError, match="Dynamo failed to run"):
        versioned_call(DenseStage(inner, Precision(), Compiler()), (torch.randn(4, 5),), weights)
    assert {name: id(each) for name, each in inner.named_parameters()} == {n: id(p) for n, p in before.items()}


def test_weights_that_are_overwritten_before_their_backward_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    inner = Layers()
    parameters = [each for each in inner.parameters() if each.requires_grad]
    stored = [parameter.detach().clone() for parameter in parameters]
    weights = CallWeights(parameters=parameters, forward=stored, backward=stored)
    stage = DenseStage(inner, Precision(), Compiler())
    outputs = versioned_call(stage, (torch.randn(4, 3, requires_grad=True),), weights)
    stored[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()
