"""A resumed job goes on with the whole state of its dense optimizer, of whatever class; others are refused at once."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import Adam as FusedAdam
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import bagpipe
from bagpipe.errors import InputError
from bagpipe.train_pipeline.optimizer import dense_optimizer
from bagpipe.train_pipeline.optimizer_rest import OptimizerRest, load_optimizer
from tests.train_pipeline.small import Small, assert_same, batches, pipeline, progress_all, state_of

ALL = batches(8)
_NAMES = itertools.count()


class _Decaying(SGD):
    """Each step halves the rate; it counts them itself, in an entry of the state's own."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * 0.5**self.num_steps
        self.num_steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.num_steps = state.pop("num_steps")
        super().load_state_dict(state)


class _Global(SGD):
    """State under a key that is no parameter, under names with dots, and in containers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        common = self.state["common"]  # type: ignore[index]
        common["num_steps"] = common.get("num_steps", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("gradients.seen", torch.zeros_like(parameter)).add_(parameter.grad)
                state.setdefault("factors", {"last": [torch.zeros_like(parameter)]})["last"][0].lerp_(parameter, 0.5)
                parameter.grad.add_(state["gradients.seen"] / common["num_steps"]).add_(state["factors"]["last"][0])
        return super().step(closure)


class _Lookahead(Optimizer):
    """Slow weights beside those of another optimizer, each with a state of its own."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        for slow, parameter in zip(self.slow, parameters, strict=True):
            slow.lerp_(parameter.detach(), 0.5)
            parameter.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        for slow, value in zip(self.slow, state_dict["slow"], strict=True):
            slow.copy_(value)


def _keyed(model: nn.Module, *names: str, make: Any = Adam) -> KeyedOptimizerWrapper:
    named = {name: p for name, p in model.named_parameters() if not names or name in names}
    return KeyedOptimizerWrapper(named, lambda parameters: make(parameters, lr=0.1))


def _warm(inner: Any) -> WarmupOptimizer:
    return WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=6, value=0.1)], lr=0.2)


def _clipping(inner: Any) -> GradientClippingOptimizer:
    return GradientClippingOptimizer(inner, GradientClipping.NORM, max_gradient=0.01)


def _hooked(model: nn.Module) -> Optimizer:
    made = SGD(model.parameters(), lr=0.1)
    seen = {"steps": 0}

    def count(optimizer: Optimizer, *_: Any) -> None:
        seen["steps"] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / seen["steps"]

    made.register_step_pre_hook(count)
    made.register_state_dict_post_hook(lambda optimizer, state: {**state, "seen": dict(seen)})
    made.register_load_state_dict_pre_hook(lambda optimizer, state: seen.update(state.pop("seen")))
    return made


_MAKE: Mapping[str, Callable[[Small], Any]] = {
    "plain": lambda model: Adagrad(model.parameters(), lr=0.1),
    "keyed": lambda model: _keyed(model, make=Adagrad),
    "combined": lambda model: CombinedOptimizer(
        [("a", _keyed(model, "over.weight")), ("b", _keyed(model, "over.bias"))]
    ),
    "clipping": lambda model: _clipping(_keyed(model)),
    "clipping of combined": lambda model: _clipping(CombinedOptimizer([_keyed(model)])),
    "warm-up": lambda model: _warm(_keyed(model)),
    "warm-up in combined": lambda model: CombinedOptimizer([("a", _warm(_clipping(_keyed(model))))]),
    "own entry": lambda model: _Decaying(model.parameters(), lr=0.1),
    "global": lambda model: _Global(model.parameters(), lr=0.1),
    "look-ahead": lambda model: _Lookahead(Adam(model.over.parameters(), lr=0.1)),
    "hooks": _hooked,
    "function": lambda model: (
        lambda parameters: CombinedOptimizer(
            [KeyedOptimizerWrapper(dict(zip("ab", parameters, strict=True)), lambda own: Adam(own, lr=0.1))]
        )
    ),
    "k-fac": lambda model: bagpipe.KfacOptimizer(model, _warm(_keyed(model, "over.weight", "over.bias", make=SGD))),
}


def _made(kind: str, **more: Any) -> bagpipe.TrainPipeline:
    model = Small()
    return pipeline(model, optimizer=_MAKE[kind](model), **more)


@pytest.fixture
def store() -> str:
    return f"memory://optimizers-{next(_NAMES)}"


@pytest.fixture(scope="module")
def whole() -> Callable[[str], dict[str, Tensor]]:
    """State after all batches without an interruption."""
    found: dict[str, dict[str, Tensor]] = {}

    def of(kind: str) -> dict[str, Tensor]:
        if kind not in found:
            with _made(kind) as trained:
                progress_all(trained, iter(ALL))
                found[kind] = state_of(trained)
        return found[kind]

    return of


@pytest.mark.parametrize("kind", _MAKE)
def test_a_checkpoint_has_the_whole_state(
    kind: str, whole: Callable[[str], dict[str, Tensor]], store: str, tmp_path: Path
) -> None:
    with _made(kind, store=store, checkpoint_dir=str(tmp_path)) as trained:
        for _ in itertools.islice(trained.train(ALL), 4):
            pass
        before = copy.deepcopy(trained.state_dict()["optimizer"])
    with _made(kind, store=store, checkpoint_dir=str(tmp_path)) as trained:
        assert trained.step == 4
        torch.testing.assert_close(trained.state_dict()["optimizer"], before, rtol=0, atol=0)
        list(trained.train(ALL))
        assert_same(state_of(trained), whole(kind))


@pytest.mark.parametrize("kind", _MAKE)
def test_a_job_from_another_has_the_whole_state(
    kind: str, whole: Callable[[str], dict[str, Tensor]], store: str, tmp_path: Path
) -> None:
    """Its first epoch is the rest of one job over all batches."""
    with _made(kind, store=store, checkpoint_dir=str(tmp_path / "first")) as trained:
        progress_all(trained, iter(ALL[:4]))
        trained.save()
    again = {"checkpoint_dir": str(tmp_path / "second"), "start_from": str(tmp_path / "first")}
    with _made(kind, store=f"{store}-second", **again) as trained:
        assert trained.step == 0
        progress_all(trained, iter(ALL[4:]))
        assert_same(state_of(trained), whole(kind))


@pytest.mark.parametrize("kind", _MAKE)
def test_a_state_dict_has_the_whole_state(kind: str, whole: Callable[[str], dict[str, Tensor]], store: str) -> None:
    with _made(kind, store=store) as trained:
        for _ in itertools.islice(trained.train(ALL), 4):
            pass
        state = trained.state_dict()
    with _made(kind, store=store, existing="rows-only") as trained:
        trained.load_state_dict(state)
        list(trained.train(ALL))
        assert_same(state_of(trained), whole(kind))


def test_gradients_are_clipped_though_the_optimizer_had_embedding_weights_on_the_meta_device() -> None:
    model = Small()
    with pipeline(model, optimizer=_clipping(_keyed(model))) as trained:
        trained.progress(iter(ALL))
        assert getattr(trained.optimizer, "last_total_grad_norm", None) is not None


@pytest.mark.parametrize("kind", ["plain", "keyed", "combined", "warm-up", "function", "k-fac"])
def test_hooks_are_called_around_each_step(kind: str) -> None:
    seen: list[str] = []
    with _made(kind) as trained:
        trained.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        trained.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        progress_all(trained, iter(ALL[:2]))
    assert seen == ["before", "after"] * 2


class _AnewState(SGD):
    """Its state is what others have, which no attribute of it shows."""

    state = property(lambda self: {}, lambda self, value: None)


class _NeedsLoss(SGD):
    def step(self, loss: Tensor) -> None:  # type: ignore[override]
        """Steps by a loss."""


def _unkeepable(parameters: Any) -> Optimizer:
    made = SGD(parameters, lr=0.1)
    made.param_groups[0]["rule"] = print
    return made


def test_optimizers_that_cannot_be_stepped_or_kept_are_refused_when_the_pipeline_is_made(tmp_path: Path) -> None:
    for make, text in (
        (torch.optim.LBFGS, "got LBFGS, whose step needs closure"),
        (lambda parameters: _NeedsLoss(parameters, lr=0.1), "got _NeedsLoss, whose step needs loss"),
        (
            lambda parameters: FusedAdam([*parameters], lr=0.1),
            "got torchrec.optim.optimizers.Adam, which only names the",
        ),
        (lambda parameters: _AnewState(parameters, lr=0.1), "one `state`, got _AnewState, which makes it anew"),
    ):
        with pytest.raises(InputError, match=text):
            pipeline(optimizer=make)
    model = Small()
    with pytest.raises(InputError, match=r"got torchrec\.optim\.optimizers\.Adam, which only names the rule of fused"):
        pipeline(model, optimizer=FusedAdam([*model.over.parameters()], lr=0.1))
    combined = CombinedOptimizer([("a", _keyed(model)), ("b", _keyed(model, "over.bias"))])
    with pytest.raises(InputError, match=r"in one optimizer of CombinedOptimizer, got one of shape \[1\]"):
        pipeline(model, optimizer=combined)
    with pytest.raises(InputError, match=r"the state of SGD cannot be kept in checkpoints: .* got builtin_function"):
        pipeline(optimizer=_unkeepable, checkpoint_dir=str(tmp_path))
    with pipeline(optimizer=_unkeepable) as trained:  # without checkpoints it can be stepped
        with pytest.raises(InputError, match="the state of SGD cannot be kept"):
            trained.save(str(tmp_path))


def test_a_scheduler_made_before_the_pipeline_sees_its_groups() -> None:
    model = Small()
    optimizer = SGD([{"params": model.bags.parameters(), "lr": 100.0}, {"params": model.over.parameters()}], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pipeline(model, optimizer=optimizer) as trained:
        trained.progress(iter(ALL))
        scheduler.step()
        assert [group["lr"] for group in trained.optimizer.param_groups] == [50.0, 0.25]


def test_the_rate_of_k_fac_is_that_of_a_group_with_parameters() -> None:
    def losses(*groups: dict[str, Any]) -> list[Tensor]:
        model = Small()
        named = {"bags": model.bags.parameters(), "over": model.over.parameters()}
        own = [{**group, "params": named[group["params"]]} for group in groups]
        with pipeline(model, optimizer=bagpipe.KfacOptimizer(model, SGD(own, lr=0.1))) as trained:
            return progress_all(trained, iter(ALL[:3]))

    assert losses({"params": "bags", "lr": 100.0}, {"params": "over"}) == losses({"params": "over"})


def test_states_of_optimizers_without_the_groups_of_embedding_weights_are_taken() -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    old = Adam(model.parameters(), lr=0.5)
    old.step()
    groups = [{"params": [weight], "lr": 1.0}, {"params": [*model.parameters()], "lr": 0.1}]
    made = dense_optimizer(Adam(groups), model, {id(weight)})
    load_optimizer(made, old.state_dict())
    assert [group["lr"] for group in made.param_groups] == [1.0, 0.5]


def test_a_checkpoint_of_an_older_version_is_refused_if_it_lacks_state() -> None:
    for make, missing in ((lambda model: _warm(_keyed(model)), "__warmup"), (_MAKE["own entry"], "num_steps")):
        model = nn.Linear(2, 1)
        with pytest.raises(InputError, match=f"expected the state '{missing}' of .* which the checkpoint of an older"):
            OptimizerRest(model, make(model)).check_older()  # type: ignore[arg-type]
    for kind in ("plain", "keyed"):
        model = nn.Linear(2, 1)
        OptimizerRest(model, _MAKE[kind](model)).check_older()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Adagrad, Adam, SGD, torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adafactor])
def test_optimizers_step_beside_the_empty_group_of_embedding_weights(kind: Any) -> None:
    model, weight = nn.Linear(2, 1), nn.Parameter(torch.zeros(3))
    made = dense_optimizer(kind([{"params": [weight]}, {"params": [*model.parameters()]}]), model, {id(weight)})
    model(torch.ones(1, 2)).sum().backward()
    made.step()
    assert set(made.state) <= set(model.parameters())
    assert [len(group["params"]) for group in made.param_groups] == [0, 2]
