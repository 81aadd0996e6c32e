"""Shared layers: order, and initial values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bagpipe.errors import InputError
from bagpipe.models.layers import NumericVectors, mlp, reset_like_fuxictr


def test_the_order_of_a_hidden_layer() -> None:
    kinds = [type(layer).__name__ for layer in mlp([3, 4, 5], dropout=0.1, batch_norm=True, outputs=1)]
    hidden = ["Linear", "BatchNorm1d", "ReLU", "Dropout"]
    assert kinds == [*hidden, *hidden, "Linear"]
    assert [type(layer).__name__ for layer in mlp([3, 4])] == ["Linear", "ReLU"]


def test_one_example_has_no_batch_norm() -> None:
    layers = mlp([3, 4], batch_norm=True)
    with pytest.raises(InputError, match="at least 2 examples of every batch, got 1"):
        layers(torch.ones(1, 3))
    layers.eval()
    assert layers(torch.ones(1, 3)).shape == (1, 4)


def test_initial_values_are_glorots() -> None:
    torch.manual_seed(0)
    layers = mlp([300, 500], outputs=2)
    reset_like_fuxictr(layers)
    linear = layers[0]
    assert isinstance(linear, nn.Linear)
    assert linear.bias.abs().max() == 0
    assert abs(linear.weight.std().item() / math.sqrt(2 / 800) - 1) < 0.02
    assert abs(NumericVectors(5000, 9).weight.std().item() / math.sqrt(2 / 10) - 1) < 0.02
