"""The dense optimizer: embedding weights are left out, strangers refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.errors import InputError
from bagpipe.train_pipeline.optimizer import dense_optimizer, group_settings, set_groups


def test_embedding_weights_and_their_empty_groups_are_left_out() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    given = torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [*model.parameters()], "lr": 0.5}])
    made = dense_optimizer(given, model, {id(weight)})
    assert made is given
    assert [(group["lr"], len(group["params"])) for group in made.param_groups] == [(0.5, 2)]


def test_a_function_makes_the_optimizer_of_all_dense_parameters() -> None:
    model = nn.Linear(2, 1)
    made = dense_optimizer(lambda parameters: torch.optim.Adam(parameters, lr=0.1), model, ())
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_parameters_of_other_models_are_refused() -> None:
    stranger = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(InputError, match=r"parameter of shape \[3, 2\] that the model has not"):
        dense_optimizer(torch.optim.SGD([stranger], lr=0.1), nn.Linear(2, 1), ())
    with pytest.raises(InputError, match="a function that makes one, got str"):
        dense_optimizer(lambda parameters: "none", nn.Linear(2, 1), ())  # type: ignore[arg-type, return-value]


def test_settings_of_groups_come_back() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}], betas=(0.5, 0.9))
    saved = group_settings(optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    set_groups(optimizer, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3]
    assert optimizer.param_groups[0]["params"] == [model.weight]
    with pytest.raises(InputError, match="expected the 1 parameter groups of the checkpoint"):
        set_groups(optimizer, saved[:1])
