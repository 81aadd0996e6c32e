from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.versioned_call import CallWeights, versioned_call
from bagpipe.errors import InputError


def called(module: nn.Module, x: Tensor, forward: Sequence[Tensor] | None, backward: Sequence[Tensor] | None) -> Any:
    """The output, with stored weights in the forward and in the backward; None: the parameters."""
    weights = CallWeights(parameters=list(module.parameters()), forward=forward, backward=backward)
    return versioned_call(module, (x,), weights)


def test_gradients_reach_the_parameters_through_stored_weights() -> None:
    """d/dW of ``(x W^T) V^T`` at stored weights; a derivative with respect to x reads the weights of the backward."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    parameters = list(module.parameters())
    forward = [torch.randn_like(parameter) for parameter in parameters]
    backward = [torch.randn_like(parameter) for parameter in parameters]
    x = torch.randn(4, 3).double().requires_grad_()
    output = called(module, x, forward, backward)
    torch.testing.assert_close(output, x @ forward[0].T @ forward[1].T)
    later = [torch.randn_like(parameter) for parameter in parameters]
    for tensor, value in zip(backward, later, strict=True):
        tensor.copy_(value)
    output.sum().backward()
    one = torch.ones(4, 1).double()
    torch.testing.assert_close(parameters[1].grad, one.T @ (x @ forward[0].T).detach())
    torch.testing.assert_close(parameters[0].grad, (one @ later[1]).T @ x.detach())
    torch.testing.assert_close(x.grad, one @ later[1] @ later[0])


def test_the_newest_weights_are_the_parameters_themselves() -> None:
    module = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    output = called(module, x, None, None)
    assert torch.equal(output, module(x))


def test_weights_that_are_overwritten_before_their_backward_are_noticed() -> None:
    module = nn.Linear(2, 2)
    parameters = list(module.parameters())
    stored = [parameter.detach().clone() for parameter in parameters]
    x = torch.randn(3, 2, requires_grad=True)
    output = called(module, x, stored, stored)
    stored[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("newest", ["forward", "backward"])
def test_parameters_may_be_views_into_a_larger_buffer(newest: str) -> None:
    """A parameter that begins inside its storage, and one that is transposed."""
    module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    module[0].weight = nn.Parameter(torch.randn(11).double()[5:].view(2, 3))
    module[1].weight = nn.Parameter(torch.randn(4, 1).double()[2:].T)
    parameters = list(module.parameters())
    stored = [torch.randn_like(parameter) for parameter in parameters]
    forward, backward = (None, stored) if newest == "forward" else (stored, None)
    x = torch.randn(4, 3).double().requires_grad_()
    output = called(module, x, forward, backward)
    output.sum().backward()
    first, second = stored if newest == "forward" else [parameter.detach() for parameter in parameters]
    torch.testing.assert_close(x.grad, torch.ones(4, 1).double() @ second @ first)


def test_parameters_may_lie_in_one_buffer() -> None:
    """As those of a layer that ranks divide: one behind the other."""
    module = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    both = torch.randn(10).double()
    module[0].weight, module[1].weight = nn.Parameter(both[:6].view(2, 3)), nn.Parameter(both[8:].view(1, 2))
    parameters = list(module.parameters())
    stored = [torch.randn_like(parameter) for parameter in parameters]
    x = torch.randn(4, 3).double().requires_grad_()
    called(module, x, None, stored).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 1).double() @ stored[1] @ stored[0])


def test_parameters_that_share_memory_are_refused() -> None:
    module = nn.Linear(2, 2)
    both = torch.randn(4)
    module.weight, module.bias = nn.Parameter(both.view(2, 2)), nn.Parameter(both[2:])
    parameters = list(module.parameters())
    stored = [parameter.detach().clone() for parameter in parameters]
    x = torch.randn(3, 2, requires_grad=True)
    with pytest.raises(InputError, match=r"share memory: weight and bias"):
        called(module, x, None, stored)
    called(module, x, stored, stored).sum().backward()
    assert module.bias.grad is not None
