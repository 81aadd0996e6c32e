"""Units of a model: layers, wrap rules, and what cannot be divided."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.errors import InputError


class Cross(nn.Module):
    """Parameters in a list belong to the module that uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bottom = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4))
        self.cross = Cross()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.towers = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])


def names_of(model: nn.Module, *wrap: str) -> dict[str, list[str]]:
    return {unit.name: [name for name, _ in unit.parameters] for unit in find_units(model, wrap)}


def test_a_unit_is_a_layer() -> None:
    assert names_of(Model()) == {
        "": ["scale"],
        "bottom.0": ["bottom.0.weight", "bottom.0.bias"],
        "bottom.2": ["bottom.2.weight", "bottom.2.bias"],
        "cross": ["cross.weights.0", "cross.weights.1"],
        "towers.0": ["towers.0.weight", "towers.0.bias"],
        "towers.1": ["towers.1.weight", "towers.1.bias"],
    }


def test_a_wrap_rule_names_modules_that_are_one_unit() -> None:
    found = names_of(Model(), "bottom*", "towers.?")
    assert list(found) == ["", "bottom", "cross", "towers.0", "towers.1"]
    assert found["bottom"] == ["bottom.0.weight", "bottom.0.bias", "bottom.2.weight", "bottom.2.bias"]
    assert list(names_of(Model(), "*")) == [""], "the outermost module that fits is the model itself"


def test_a_rule_that_fits_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"dense.wrap: 'top' fits no module with parameters; there are bottom, "):
        find_units(Model(), ["top"])


def test_one_tensor_in_two_layers_is_refused_unless_a_unit_has_both() -> None:
    model = Model()
    model.towers[1].weight = model.towers[0].weight
    line = (
        "dense.shard: model parameters towers.0.weight and towers.1.weight are one tensor in two layers, expected one: "
        "name in dense.wrap a module that has both"
    )
    with pytest.raises(InputError) as refused:
        find_units(model)
    assert str(refused.value) == line
    assert names_of(model, "towers")["towers"] == ["towers.0.weight", "towers.0.bias", "towers.1.bias"]


def test_running_means_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(InputError, match=r"dense.shard: module 1 \(BatchNorm1d\) changes buffers in its forward"):
        find_units(model)
    assert len(find_units(nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))) == 1


def test_two_dtypes_in_a_layer_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InputError, match=r"weight and bias of one layer are torch.float32 and torch.float64"):
        find_units(model)


def test_compiled_code_is_one_unit() -> None:
    """Of the model's parameters that it has; what is left of other layers stays with them."""
    model = Model()
    compiled = nn.ModuleList([model.bottom, model.towers[0]])
    units = find_units(model, ("bottom",), compiled)
    assert [(unit.name, [name for name, _ in unit.parameters]) for unit in units][:3] == [
        ("", ["scale"]),
        ("cross", ["cross.weights.0", "cross.weights.1"]),
        ("towers.1", ["towers.1.weight", "towers.1.bias"]),
    ]
    assert units[-1].module is compiled
    assert [name for name, _ in units[-1].parameters] == [
        name for name, _ in model.named_parameters() if name.startswith(("bottom", "towers.0"))
    ]
