"""Initialisation of models built on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.embedding.materialise import materialise
from bagpipe.errors import InputError

CPU = torch.device("cpu")


def test_values_are_those_of_plain_construction() -> None:
    """Same generator and order give the values of a model built on the device."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 2)), nn.LSTM(2, 3), nn.Dropout()
        )

    torch.manual_seed(3)
    expected = build()
    with torch.device("meta"):
        model = build()
    torch.manual_seed(3)
    materialise(model, CPU, torch.float32)
    for (name, got), (_, value) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(got, value), name


def test_parents_come_after_their_children() -> None:
    """torch's attention zeroes the bias of a child, which the child's own reset does not."""
    with torch.device("meta"):
        model = nn.MultiheadAttention(8, 2)
    materialise(model, CPU, torch.float32)
    assert not model.out_proj.bias.any()


def test_float64_starts_from_the_numbers_of_float32() -> None:
    weights = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(3, 2)
        materialise(model, CPU, dtype)
        assert model.weight.dtype == dtype
        weights.append(model.weight.double())
    assert torch.equal(*weights)


def test_real_parameters_keep_their_values() -> None:
    real = nn.Linear(3, 2)
    before = real.weight.clone()
    materialise(nn.Sequential(real, nn.Linear(2, 2, device="meta")), CPU, torch.float32)
    assert torch.equal(real.weight, before)


def test_parameters_stay_the_objects_that_others_hold() -> None:
    """Shared ones stay shared, and they keep their attributes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LSTM(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[3].weight = model[0].weight
    model[0].bias.mark = "own"
    model[1].bias.requires_grad_(False)
    held = dict(model.named_parameters())
    materialise(model, CPU, torch.float64)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in held.items()
    }
    assert model[1].weight is model[0].weight is model[3].weight
    assert (model[0].bias.mark, model[1].bias.requires_grad) == ("own", False)
    model[3](model[2](model[1](model[0](torch.ones(2, 3, dtype=torch.float64))))[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in held.values() if parameter.requires_grad)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


class Hidden(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2, device="meta")
        self.index = torch.arange(3, device="meta")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Bare(), r"the model itself \(Bare\) holds scale on the meta device"),
        (nn.Sequential(nn.Sequential(Bare())), r"module '0\.0' \(Bare\) holds scale on the meta device"),
        (nn.Sequential(Hidden()), r"module '0' \(Hidden\) holds bias, weight, index on the meta device"),
    ],
)
def test_modules_that_cannot_be_reset_are_named(model: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        materialise(model, CPU, torch.float32)
