"""`Kfac` on several ranks, with a lag, and from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import backward
from torch.nn.functional import binary_cross_entropy_with_logits

from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.kfac import FactorSource, Kfac, KfacSettings, step_limit
from bagpipe.dense.precondition.layers import linear_layers, owners
from bagpipe.errors import InputError
from bagpipe.testing.local_peers import LocalPeers
from tests.dense.precondition.reference import Reference, batch_of, small_model
from tests.distributed.threads import run_threads

LR = 0.3
STEPS = 5


class Rank:
    """One rank's loop: gradients are summed over the ranks, then every action in order."""

    def __init__(self, settings: KfacSettings, peers: LocalPeers | None = None) -> None:
        self.model = small_model()
        layers = linear_layers(self.model)
        self.group: Any = None
        exchange, owned = None, None
        if peers is not None:
            (self.group,) = peers.open_stage_groups([range(peers.world_size)]).values()
            places = owners(len(layers), range(peers.world_size))
            exchange = KfacExchange(self.group, layers, places)
            owned = [number for number, place in enumerate(places) if place == peers.rank]
        self.kfac = Kfac(layers, settings, owned=owned, exchange=exchange)
        self.capture = self.kfac.capture(layers)
        self.settings = settings

    def step(self, b: int, inputs: Tensor, labels: Tensor, num_examples: int) -> None:
        logits = self.capture.during(b, lambda: self.model(inputs)).squeeze(1)
        backward(binary_cross_entropy_with_logits(logits, labels, reduction="sum") / num_examples)
        self.capture.add_inputs(b, b)
        self.capture.add_outputs(b, b, factor=num_examples, num_examples=len(inputs))
        if not self.settings.lag:
            self.kfac.add_up(b)
        for layer in self.kfac.owned:
            self.kfac.invert(b, layer)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            if self.group is not None:
                parts = [torch.empty_like(parameter.grad) for _ in range(self.group.world_size)]
                gathered = torch.cat([part.reshape(-1) for part in parts])
                self.group.all_gather(gathered, parameter.grad.reshape(-1))
                parameter.grad = gathered.view(self.group.world_size, -1).sum(0).view(parameter.shape)
        self.kfac.precondition()
        self.kfac.share()
        self.kfac.limit(step_limit(self.kfac.sizes, kappa=self.settings.kappa, lr=LR))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.sub_(LR * parameter.grad if parameter.grad is not None else 0)
                parameter.grad = None

    def weights(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


def alone(settings: KfacSettings, steps: Sequence[int] = range(STEPS), rank: Rank | None = None) -> list[Tensor]:
    rank = Rank(settings) if rank is None else rank
    for b in steps:
        rank.step(b, *batch_of(b), 6)
    return rank.weights()


def on_ranks(settings: KfacSettings, *, identical: bool) -> list[list[Tensor]]:
    """Weights of two ranks that have the same examples each, or a half of them each."""

    def run(peers: LocalPeers) -> list[Tensor]:
        rank = Rank(settings, peers)
        for b in range(STEPS):
            inputs, labels = batch_of(b)
            part = slice(None) if identical else slice(3 * peers.rank, 3 * peers.rank + 3)
            rank.step(b, inputs[part], labels[part], 12 if identical else 6)
        return rank.weights()

    ended = run_threads(2, run)
    assert [each.error for each in ended] == [None, None]
    return [each.value for each in ended]


@pytest.mark.parametrize("factors", ["local", "summed"])
def test_two_ranks_with_the_same_examples_equal_one(factors: FactorSource) -> None:
    settings = KfacSettings(factors=factors)
    first, second = on_ranks(settings, identical=True)
    for a, b, expected in zip(first, second, alone(settings), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-12)


def test_summed_factors_are_those_of_the_whole_batch() -> None:
    settings = KfacSettings(factors="summed", inverse_every=2)
    for a, expected in zip(on_ranks(settings, identical=False)[0], alone(settings), strict=True):
        torch.testing.assert_close(a, expected, rtol=0, atol=1e-12)


def test_local_factors_are_those_of_the_owner() -> None:
    """Layers 0 and 2 belong to rank 0, which has the first half of each batch."""
    settings = KfacSettings(factors="local", inverse_every=2)
    reference = Reference(small_model(), settings, LR)
    halves = range(3), range(3, 6)
    for b in range(STEPS):
        reference.step(*batch_of(b), owned=[halves[0], halves[1], halves[0]])
    found = on_ranks(settings, identical=False)[0]
    torch.testing.assert_close(found[0], reference.weights[0][:, :-1], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[2], reference.weights[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", [KfacSettings(lag=1), KfacSettings(lag=1, factor_every=2, inverse_every=2)])
def test_inverses_of_the_batch_before(settings: KfacSettings) -> None:
    reference = Reference(small_model(), settings, LR)
    for b in range(STEPS):
        reference.step(*batch_of(b))
    weights = alone(settings)
    torch.testing.assert_close(weights[0], reference.weights[0][:, :-1], rtol=0, atol=1e-10)
    torch.testing.assert_close(weights[2], reference.weights[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [KfacSettings(), KfacSettings(lag=1), KfacSettings(inverse_every=20), KfacSettings(lag=1, inverse_every=3)],
)
@pytest.mark.parametrize("inverted", [False, True])
def test_a_checkpoint_goes_on_with_the_same_bits(settings: KfacSettings, inverted: bool) -> None:
    """Also of a moment when a step's inversions are done, in a bubble before its first forward."""
    expected = alone(settings)
    rank = Rank(settings)
    alone(settings, range(3), rank)
    if inverted and settings.lag:
        for layer in rank.kfac.owned:
            rank.kfac.invert(3, layer)
    saved = {name: tensor.clone() for name, tensor in rank.kfac.tensors(3).items()}
    resumed = Rank(settings)
    resumed.kfac.load(saved)
    resumed.model.load_state_dict(rank.model.state_dict())
    found = alone(settings, range(3, STEPS), resumed)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_batch_that_is_left_out_changes_no_factor() -> None:
    rank = Rank(KfacSettings())
    rank.step(0, *batch_of(0), 6)
    before = {name: tensor.clone() for name, tensor in rank.kfac.tensors(1).items() if "factor" in name}
    logits = rank.capture.during(1, lambda: rank.model(batch_of(1)[0]))
    logits.sum().backward()
    rank.capture.add_inputs(1, 1)
    rank.capture.add_outputs(1, 1, factor=6, num_examples=6)
    rank.kfac.drop(1)
    rank.kfac.add_up(1)
    for layer in rank.kfac.owned:
        rank.kfac.invert(1, layer)
    assert all(torch.equal(before[name], rank.kfac.tensors(2)[name]) for name in before)


def test_a_state_is_taken_back_whole() -> None:
    """Also by a K-FAC that has gone on."""
    expected = alone(KfacSettings())
    rank = Rank(KfacSettings())
    alone(KfacSettings(), range(3), rank)
    saved = {name: tensor.clone() for name, tensor in rank.kfac.tensors(3).items()}
    weights = copy.deepcopy(rank.model.state_dict())
    alone(KfacSettings(), range(3, STEPS), rank)
    rank.kfac.load(saved)
    rank.model.load_state_dict(weights)
    found = alone(KfacSettings(), range(3, STEPS), rank)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_rank_without_layers_keeps_nothing() -> None:
    layers = linear_layers(small_model())
    kfac = Kfac(layers, KfacSettings(), owned=[])
    kfac.capture(layers)
    for batch in range(3):
        kfac.add_up(batch)
    assert kfac.tensors(3) == {}
    assert not kfac._pending


def test_a_layer_without_inverses_does_not_wait_for_the_period() -> None:
    """Its first batches were left out."""
    rank = Rank(KfacSettings(inverse_every=20))
    rank.kfac.drop(0)
    for layer in rank.kfac.owned:
        rank.kfac.invert(0, layer)
    rank.step(1, *batch_of(1), 6)
    assert "0.inverse_a" in rank.kfac.tensors(2)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"decay": 1.0}, "K-FAC: decay must be at least 0 and below 1, got 1.0"),
        ({"damping": -1.0}, "K-FAC: damping must be at least 0, got -1.0"),
        ({"kappa": -1.0}, "K-FAC: kappa must be at least 0, got -1.0"),
        ({"factor_every": 0}, "K-FAC: factor_every must be at least 1, got 0"),
        ({"inverse_every": 0}, "K-FAC: inverse_every must be at least 1, got 0"),
        ({"lag": 2}, "K-FAC: lag must be 0 or 1, got 2"),
        ({"factors": "some"}, "K-FAC: factors must be summed or local, got some"),
    ],
)
def test_numbers_outside_their_ranges(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        KfacSettings(**values)
    assert str(refused.value) == line


def test_other_state_is_refused() -> None:
    rank = Rank(KfacSettings())
    alone(KfacSettings(), range(2), rank)
    saved = rank.kfac.tensors(2)
    with pytest.raises(InputError, match="no K-FAC factors of layer 2"):
        Rank(KfacSettings()).kfac.load({name: value for name, value in saved.items() if not name.startswith("2.")})
    with pytest.raises(InputError, match=r"factor_a of layer 0 is \[2, 2\], expected \[5, 5\]"):
        Rank(KfacSettings()).kfac.load({**saved, "0.factor_a": torch.eye(2)})


def test_limit_of_a_step() -> None:
    sizes = torch.tensor([3.0, 1.0])
    assert step_limit(sizes, kappa=0.0, lr=1.0) is None
    limited, free = step_limit(sizes, kappa=0.01, lr=0.5), step_limit(sizes, kappa=10.0, lr=0.5)
    assert limited is not None
    assert free is not None
    assert limited.item() == pytest.approx(0.1)
    assert free.item() == 1.0
    zero = step_limit(torch.zeros(2), kappa=0.01, lr=0.5)
    assert zero is not None
    assert zero.item() == 1.0
