"""The dense optimizer: embedding weights are left out, strangers refused."""

from __future__ import annotations

import contextlib
import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam
from torchrec.optim.keyed import KeyedOptimizerWrapper

from bagpipe.dense.lamb import Lamb
from bagpipe.errors import InputError
from bagpipe.train_pipeline.optimizer import dense_optimizer, group_settings, set_groups
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of

with warnings.catch_warnings():  # torchrec warns about itself
    warnings.simplefilter("ignore")
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


def test_embedding_weights_are_left_out_and_groups_stay() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    given = torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [*model.parameters()], "lr": 0.5}])
    given.state[weight] = {"momentum_buffer": torch.zeros(3)}
    made = dense_optimizer(given, model, {id(weight)})
    assert made is given
    assert [(group["lr"], len(group["params"])) for group in made.param_groups] == [(1.0, 0), (0.5, 2)]
    assert not made.state


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
    groups: list[dict[str, Any]] = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias]}]
    optimizer = torch.optim.Adam(groups, betas=(0.5, 0.9))
    saved = group_settings(optimizer)
    optimizer.param_groups[0]["lr"] = 7.0
    set_groups(optimizer, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1e-3]
    assert optimizer.param_groups[0]["params"] == [model.weight]
    with pytest.raises(InputError, match="expected the 1 parameter groups of the checkpoint"):
        set_groups(optimizer, saved[:1])


def test_settings_of_a_version_that_dropped_empty_groups_come_back() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    saved = group_settings(torch.optim.SGD(model.parameters(), lr=0.25))
    given = torch.optim.SGD([{"params": [weight], "lr": 1.0}, {"params": [*model.parameters()], "lr": 0.5}])
    made = dense_optimizer(given, model, {id(weight)})
    set_groups(made, saved)
    assert [group["lr"] for group in made.param_groups] == [1.0, 0.25]


class _Renamed(Adam):
    """A user's own, with the step of torch's."""


class _Own(Adam):
    """A user's own, which divides by no epsilon."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad)


_DIVIDING = [kind for kind in vars(torch.optim).values() if "eps" in getattr(kind.__init__, "__annotations__", ())]


@pytest.mark.parametrize("kind", [*_DIVIDING, RowWiseAdagrad, Lamb, _Renamed, _Own], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("dtype", "eps"),
    [
        ("float32", 0.0),
        ("float32", 1e-50),
        ("float32", 1e-12),
        ("float64", 1e-50),
        ("float16", 1e-9),
        ("float16", 1e-3),
        ("bfloat16", 1e-9),
    ],
)
@pytest.mark.parametrize("is_fused", [False, True])
def test_an_epsilon_that_is_0_where_a_step_divides_by_it_is_refused(
    kind: Any, dtype: str, eps: float, is_fused: bool
) -> None:
    """Those refused make NaN of a gradient of 0, and no others."""
    model = nn.Linear(2, 1, bias=False, dtype=getattr(torch, dtype))
    fused = {"fused": True} if is_fused and "fused" in inspect.signature(kind).parameters else {}
    if (is_fused and not fused) or kind is torch.optim.SparseAdam:
        return  # torch refuses that, and the gradient below
    optimizer = kind(model.parameters(), lr=0.1, eps=(eps, 1e-3) if kind is torch.optim.Adafactor else eps, **fused)
    message = ""
    try:
        dense_optimizer(optimizer, model, ())
    except InputError as error:
        message = str(error)
    for _ in range(8):  # some begin to divide later
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    assert bool(message) == (not bool(model.weight.isfinite().all()))
    expected = rf"{kind.__name__} has eps .*, which is 0 in b?float\d\d: expected more, .* 0 / 0"
    assert not message or re.fullmatch(expected, message)


def test_the_epsilon_of_embedding_weights_is_none_of_the_dense_part() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3, dtype=torch.float16))
    given = Adam([{"params": [weight], "eps": 0.0}, {"params": [*model.parameters()]}])
    assert len(dense_optimizer(given, model, {id(weight)}).param_groups) == 2
    with pytest.raises(InputError, match=r"Adam has eps 0\.0"):
        dense_optimizer(
            KeyedOptimizerWrapper(dict(model.named_parameters()), lambda own: Adam(own, eps=0.0)), model, ()
        )


@pytest.mark.parametrize(("start", "is_taken"), [(0.1, True), (1e-50, False)])
@pytest.mark.parametrize("kind", [torch.optim.Adagrad, RowWiseAdagrad])
def test_a_sum_that_begins_above_0_needs_no_epsilon(kind: Any, start: float, is_taken: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = kind(model.parameters(), lr=0.1, eps=0.0, initial_accumulator_value=start)
    refused = contextlib.nullcontext() if is_taken else pytest.raises(InputError, match="which is 0 in float32")
    with refused:
        dense_optimizer(optimizer, model, ())
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert bool(model.weight.isfinite().all()) == is_taken


def test_an_optimizer_made_before_dense_parameters_had_values_steps_them_unless_it_has_state() -> None:
    def trained(make: Any) -> dict[str, torch.Tensor]:
        model = Small()
        model.over = nn.Linear(12, 1, device="meta")
        torch.manual_seed(0)
        with pipeline(model, optimizer=make(model)) as made:
            progress_all(made, iter(batches(3)))
            return state_of(made)

    before = trained(lambda model: Adam(model.parameters(), lr=0.1))
    assert_same(before, trained(lambda model: lambda parameters: Adam(parameters, lr=0.1)))
    with pytest.raises(InputError, match="the optimizer has state 'sum' on the meta device"):
        trained(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1))
