"""`Weights`: one program over every way to hold a whole model's parameters gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.clip import NO_CLIP, Clip
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.pipeline.stream import NullStreams
from bagpipe.training.chunked_weights import ChunkedWeights
from bagpipe.training.weights import ResidentWeights, ShardedWeights, Weights
from tests.distributed.processes import run_peers

STEPS = 3
#: Too small for the model, its gradients and state at once.
BUDGET = Budget(num_bytes=4 * 512, chunk_bytes=512)
CLIPS: Mapping[str, Clip] = {
    "none": NO_CLIP,
    "value": Clip(value=0.01),
    "norm": Clip(norm=0.05),
    "rows": Clip(norm=1.0, scope="rows"),
}
#: Its gradients are looked at and replaced between their sum and the step, as K-FAC does.
SHOWN = frozenset(("0.weight", "0.bias"))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).double()


def train(weights: Weights, clip: Clip, *, rank: int = 0, num_ranks: int = 1, shows: bool = False) -> dict[str, bytes]:
    """Parameters after some batches, of which one is left out, and an evaluation between two of them."""
    weights.begin()
    for step in range(STEPS):
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        own = inputs[rank * 6 // num_ranks : (rank + 1) * 6 // num_ranks]
        weights.begin_batch()
        with weights.forward():
            loss = weights.model(own).square().sum() / 6
        with weights.backward():
            loss.backward()
        assert {name for name, _ in weights.gradients()}
        is_bad = weights.reduce(is_bad=step == 1 and rank == 0)
        if not is_bad and step != 1:
            prepare: Any = halve
            if shows:
                weights.show(SHOWN, halve)
                for name, parameter in weights.model.named_parameters():
                    if name in SHOWN:
                        assert parameter.grad is not None
                        parameter.grad.mul_(3.0)
                weights.take_shown(SHOWN)
                prepare = leave
            norms = weights.measure(prepare, clip)
            weights.step(clip, clip.limited(norms, torch.zeros((), dtype=torch.float64)))
        weights.clear()
        with weights.whole(), torch.no_grad():
            weights.model(own)
    weights.rest()
    weights.end()
    weights.close()
    return {name: parameter.detach().numpy().tobytes() for name, parameter in weights.model.named_parameters()}


def halve(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def leave(parameters: Any) -> None:
    return


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def resident() -> Weights:
    model = make_model()
    return ResidentWeights(model, optimizer_of(model.parameters()))


def in_chunks(weights: Weights) -> Weights:
    return ChunkedWeights(weights, budget=BUDGET, streams=NullStreams())


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("shows", [False, True])
def test_chunks_have_the_bits_of_a_model_without(clip: str, shows: bool) -> None:
    whole = train(resident(), CLIPS[clip], shows=shows)
    assert train(in_chunks(resident()), CLIPS[clip], shows=shows) == whole
    assert whole != train(resident(), CLIPS[clip], shows=not shows)


def test_the_budget_is_divided_into_chunks() -> None:
    weights = in_chunks(resident())
    assert isinstance(weights, ChunkedWeights)
    assert weights.chunked.arena.num_slots == 4


def stacks_of(peers: TorchPeers, stack: ExitStack) -> Mapping[str, Callable[[], Weights]]:
    """By name, in the order in which all ranks make them."""

    def replicated() -> Weights:
        model = make_model()
        sums = stack.enter_context(DenseParallel(model, peers.dense, overlaps=False))
        return ResidentWeights(model, optimizer_of(model.parameters()), sums)

    def sharded(level: Any) -> Weights:
        model = make_model()
        (gathers,) = peers.open_stage_groups([range(peers.world_size)]).values()
        shards = stack.enter_context(
            ShardedModel(model, find_units(model, ()), level, sums=peers.dense, gathers=gathers)
        )
        return ShardedWeights(model, optimizer_of([*shards.segments.values()]), shards)

    levels = ("optimizer", "gradients", "parameters")
    plain: dict[str, Callable[[], Weights]] = {"none": replicated, **{each: partial(sharded, each) for each in levels}}
    return {
        **plain,
        **{f"chunked {name}": partial(lambda make: in_chunks(make()), make) for name, make in plain.items()},
    }


def ends_of(peers: TorchPeers, clip: str, shows: bool) -> dict[str, dict[str, bytes]]:
    with ExitStack() as stack:
        return {
            name: train(make(), CLIPS[clip], rank=peers.rank, num_ranks=peers.world_size, shows=shows)
            for name, make in stacks_of(peers, stack).items()
        }


@pytest.mark.multiproc
@pytest.mark.parametrize(("clip", "shows"), [("none", False), ("value", True), ("norm", False)])
def test_every_stack_has_the_bits_of_replicas(clip: str, shows: bool) -> None:
    one, two = (ended.value for ended in run_peers(2, ends_of, clip, shows))
    assert one == two
    assert len(one) == 8
    for name, values in one.items():
        if clip != "norm":
            assert values == one["none"], name
        for parameter, value in values.items():  # norms of shares are sums of squares, of whole ones norms
            found, expected = (
                torch.frombuffer(bytearray(each), dtype=torch.float64) for each in (value, one["none"][parameter])
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-14, msg=f"{name} {parameter}")


def test_parameters_that_a_run_gets_on_its_way_are_looked_at() -> None:
    """A user can give the model and its optimizer others between two batches, and freeze some."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weights = ResidentWeights(model, optimizer)
    weights.begin()
    model.append(nn.Linear(1, 1, bias=False))
    optimizer.add_param_group({"params": [model[2].weight]})
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert [name for name, _ in weights.gradients()] == ["1.weight", "1.bias", "2.weight"]
    model[1].bias = nn.Parameter(torch.zeros(1))
    optimizer.param_groups[0]["params"] = [*model[0].parameters(), *model[1].parameters()]
    assert any(parameter is model[1].bias for parameter in weights.stepped)
