"""Layers that K-FAC preconditions, who owns them, and their gradients as one matrix."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from bagpipe.dense.precondition.layers import combined_gradient, factor_bytes, linear_layers, owners, set_gradient
from bagpipe.errors import InputError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.middle = nn.Linear(4, 2)
        self.middle.bias.requires_grad_(False)
        self.top = nn.Linear(2, 1, bias=False)


def test_layers_in_the_order_of_their_modules() -> None:
    layers = linear_layers(Model())
    assert [layer.name for layer in layers] == ["bottom.0", "middle", "top"]
    assert [(layer.num_inputs, layer.num_outputs) for layer in layers] == [(4, 4), (4, 2), (2, 1)]
    assert [len(layer.parameters) for layer in layers] == [2, 1, 1]
    elements = 16 + 16 + 16 + 4 + 4 + 1
    assert factor_bytes(layers) == 3 * 4 * elements, "factors, inverses and sums of a batch"
    assert factor_bytes(layers, lag=1) == 4 * 4 * elements
    assert factor_bytes(layers, copies=1) == 5 * 4 * elements, "and factors and inverses as they were"
    assert factor_bytes(layers[:0], layers) == 3 * 4 * elements, "sums of all layers, to be sent and received"


def test_layers_of_a_stage_have_the_names_of_the_model() -> None:
    model = Model()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [layer.name for layer in linear_layers(model.bottom, names)] == ["bottom.0"]


def test_layers_are_dealt_to_the_ranks_that_hold_them() -> None:
    assert owners(5, range(3)) == (0, 1, 2, 0, 1)
    assert owners(3, (4, 1)) == (4, 1, 4)


def test_weight_and_bias_are_one_matrix() -> None:
    model = Model()
    bottom, _, top = linear_layers(model)
    assert combined_gradient(bottom) is None
    bottom.weight.grad, top.weight.grad = torch.ones(4, 3), torch.ones(1, 2)
    combined = combined_gradient(bottom)
    assert combined is not None
    assert combined.tolist() == [[1, 1, 1, 0]] * 4
    set_gradient(bottom, torch.arange(16.0).view(4, 4))
    assert bottom.bias is not None
    assert bottom.bias.grad is not None
    assert bottom.bias.grad.tolist() == [3, 7, 11, 15]
    assert bottom.weight.grad.tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10], [12, 13, 14]]
    set_gradient(top, torch.tensor([[5.0, 6.0]]))
    assert top.weight.grad is not None
    assert top.weight.grad.tolist() == [[5, 6]]


def test_what_has_other_factors_is_refused() -> None:
    with pytest.raises(InputError, match="needs linear layers: 1 is a Conv2d, whose factors are not supported"):
        linear_layers(nn.Sequential(nn.Linear(2, 2), nn.Conv2d(1, 1, 3)))
    with pytest.raises(InputError, match="K-FAC needs plain weights: 0 is parametrized"):
        linear_layers(nn.Sequential(spectral_norm(nn.Linear(2, 2))))
    model = Model()
    model.top = nn.Linear(4, 2)
    model.top.weight = model.middle.weight
    with pytest.raises(InputError, match="layers middle and top share a weight, expected one layer for each"):
        linear_layers(model)
