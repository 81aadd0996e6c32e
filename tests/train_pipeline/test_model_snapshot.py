"""A pipeline that is refused has changed nothing: a corrected call takes the same objects, with the same results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

with warnings.catch_warnings():  # torchrec warns about itself
    warnings.simplefilter("ignore")
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import bagpipe
from bagpipe.errors import InputError
from bagpipe.train_pipeline.model_snapshot import unchanged_on_error
from tests.train_pipeline.small import Small, assert_same, batches, progress_all, state_of


class Both(Small):
    """With dense parameters on the meta device and on a real one, and a module that keeps its weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.later = nn.Linear(4, 4, device="meta")
        self.memory = nn.LSTM(4, 4, device="meta")
        self.norm = nn.BatchNorm1d(12)
        self.seen: list[int] = []
        self.bags.register_forward_hook(lambda *_: self.seen.append(1))


def _build(model: nn.Module, optimizer: Any, **more: Any) -> bagpipe.TrainPipeline:
    settings: dict[str, Any] = {"rows": bagpipe.optim.Adagrad(0.05), "store": "memory://", "planner": "inline"}
    return bagpipe.TrainPipeline(model, optimizer, **{**settings, **more})


def _sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class _Own(Exception):
    """An error of the user's."""


def _raises(parameters: Any) -> Optimizer:
    raise _Own(len(list(parameters)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
        {"optimizer": lambda parameters: None},
        {"optimizer": _raises},
        {"rows": {"t_f9": bagpipe.optim.SGD(0.1)}},
        {"rows": "adagrad"},
        {"rows": None},
        {"row_dtype": "int8"},
        {"unbounded": ("t_f9",)},
        {"cache_rows": -1},
        {"device": "cuda:99"},
        {"model": "a model"},
        {"optimizer": None},
        {"sparse": 3},
        {"grad_scaler": torch.amp.GradScaler("cpu", init_scale=3.0)},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_a_corrected_call_after_a_refused_one_is_as_if_it_were_the_first(wrong: dict[str, Any]) -> None:
    states = []
    for settings in ({}, wrong):
        model = Both()
        names = [name for name, _ in model.named_parameters()]
        over = model.over.weight
        if settings:
            with pytest.raises((InputError, _Own)):
                _build(**{"model": model, "optimizer": _sgd, **settings})
            assert [name for name, _ in model.named_parameters()] == names
            assert model.over.weight is over
            assert model.later.weight.is_meta
        with _build(model, _sgd) as trained:
            assert isinstance(trained, bagpipe.TrainPipeline)
            progress_all(trained, iter(batches(3)))
            states.append(state_of(trained))
        assert len(model.seen) == 3
    assert_same(*states)


def test_an_optimizer_of_a_refused_pipeline_has_its_groups_and_state() -> None:
    model, stranger = Small("cpu"), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adagrad(
        [{"params": list(model.bags.parameters())}, {"params": list(model.over.parameters())}, {"params": [stranger]}],
        lr=0.1,
    )
    groups, states = [list(group["params"]) for group in optimizer.param_groups], len(optimizer.state)
    with pytest.raises(InputError, match="a parameter of shape"):
        _build(model, optimizer, import_weights=True)
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in group] for group in groups
    ]
    assert len(optimizer.state) == states == 6
    del optimizer.param_groups[2]
    _build(model, optimizer, import_weights=True).close()


def test_optimizers_inside_of_torchrec_s_wrappers_are_put_back() -> None:
    model = Small("cpu")
    inner = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda ps: torch.optim.Adagrad(ps, lr=0.1))
    wrapper = CombinedOptimizer([("all", inner)])
    inner.named, inner.outer = {"wrapper": wrapper}, wrapper  # a circle
    groups, states = len(inner.param_groups[0]["params"]), len(inner.state)
    for optimizer in (inner, wrapper):
        with pytest.raises(_Own):
            _fail_after(model, optimizer, lambda: _empty(inner))
        assert (len(inner.param_groups[0]["params"]), len(inner.state)) == (groups, states) == (5, 5)
        assert optimizer.param_groups[0]["params"][0] is model.bags.embedding_bags["t_f0"].weight


def _empty(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = []
    optimizer.state.clear()
    optimizer.params = {}


def _fail_after(model: nn.Module, optimizer: object, change: Callable[[], object]) -> None:
    with unchanged_on_error(model, optimizer, torch.device("cpu")):
        change()
        raise _Own


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.register_buffer("more", torch.zeros(2)),
        lambda model: setattr(model, "over", nn.Identity()),
        lambda model: nn.init.normal_(torch.empty(100)),
    ],
)
def test_tensors_modules_and_random_numbers_are_put_back(change: Callable[[nn.Module], object]) -> None:
    model = Both()
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    dtypes = [parameter.dtype for parameter in model.parameters()]
    random = torch.get_rng_state()

    with pytest.raises(_Own):
        _fail_after(model, None, lambda: change(model))
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert [parameter.dtype for parameter in model.parameters()] == dtypes
    assert torch.equal(torch.get_rng_state(), random)
