"""Closed parameters: no function reads their values, and what is no value stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.closed_parameter import Left, absent, close, open_again
from bagpipe.errors import InputError


class Marked(nn.Parameter):
    """A user's own class of parameters."""


@pytest.mark.parametrize("kind", [nn.Parameter, Marked])
def test_a_closed_parameter_has_no_values(kind: type[nn.Parameter]) -> None:
    layer = nn.Linear(3, 2)
    layer.weight = weight = kind(torch.ones(2, 3))
    weight.grad = torch.zeros(2, 3)
    alias = [weight]
    close(weight)
    close(weight)
    for use in (
        lambda: layer(torch.ones(1, 3)),
        lambda: alias[0] + 1,
        lambda: weight.T,
        lambda: weight.data,
        lambda: weight.to(torch.float64),
        lambda: weight[0, 0],
        lambda: torch.cat([weight]),
        lambda: copy.deepcopy(layer),
        lambda: layer.state_dict(),
    ):
        with pytest.raises(InputError, match="used outside the forward of its layer"):
            use()
    assert (weight.shape, weight.dtype, weight.size(0), len(weight), weight.requires_grad) == (
        torch.Size([2, 3]),
        torch.float32,
        2,
        2,
        True,
    )
    assert torch.ones(1).to(weight).dtype == weight.dtype
    assert isinstance(weight, nn.Parameter)
    assert dict(layer.named_parameters())["weight"] is weight
    layer.zero_grad()
    assert weight.grad is None
    open_again(weight)
    assert type(weight) is kind
    assert layer(torch.ones(1, 3)).requires_grad


def test_a_stand_in_is_one_number_of_memory() -> None:
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    weight.data = absent(weight)
    assert (weight.shape, weight.dtype, weight.untyped_storage().nbytes()) == (torch.Size([2, 3]), torch.float64, 8)
    assert weight.isnan().all()


def test_a_kept_view_is_found() -> None:
    left = Left()

    def leave(keep: bool) -> Tensor | None:
        values = torch.ones(3)
        left.add(values)
        return values[1:] if keep else None

    leave(keep=False)
    assert not left.are_held()
    view = leave(keep=True)
    assert left.are_held()
    assert view is not None
    assert not left.are_held(), "asked for once"
