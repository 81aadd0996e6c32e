"""Broadcast of the model to all ranks, before and after training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.dense.parallel.broadcast import HeldStage, share_model, share_stages
from bagpipe.training.digest import dense_digest
from tests.distributed.processes import Ended, run_peers
from tests.distributed.threads import run_threads

pytestmark = pytest.mark.multiproc

#: Stage -> ranks that train it; the values of the first one are broadcast.
HOLDERS = ((2, 0), (0, 1), (2,), (1, 2))

#: Ranks that are threads share torch's generator.
SEEDING = threading.Lock()

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def make_model(seed: int) -> nn.Sequential:
    with SEEDING:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in HOLDERS))


def stages_of(model: nn.Sequential) -> list[HeldStage]:
    return [
        HeldStage(
            holders=holders,
            parameters=tuple((f"{number}.{name}", value) for name, value in model[number].named_parameters()),
            buffers=tuple(model[number].buffers()),
        )
        for number, holders in enumerate(HOLDERS)
    ]


def train_stage(model: nn.Sequential, optimizer: torch.optim.Optimizer, stage: int, *, differs: bool) -> None:
    """Train one stage alone. The last stage's bias gets no gradient, and one state is unusual."""
    generator = torch.Generator().manual_seed(stage + 100 * differs)
    for _ in range(1 + differs):
        loss = model[stage](torch.randn(6, 4, generator=generator)).sigmoid().square().mean()
        loss.backward()
        if stage == len(HOLDERS) - 1:
            model[stage][0].bias.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if stage == 0:
        optimizer.state[model[0][0].bias].update({"count": 3 + differs, "nothing": None, "rate": 0.1})


def train_alone(kind: str) -> tuple[str, list[int]]:
    """The digest of the whole model, and the parameters that have state."""
    model = make_model(0)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for stage in range(len(HOLDERS)):
        train_stage(model, optimizer, stage, differs=False)
    return dense_digest(model, optimizer), sorted(optimizer.state_dict()["state"])


def train(peers: Any, kind: str) -> list[tuple[str, list[int]]]:
    """Train the held stages; only the first holder ends as expected. Returns the broadcast and the expected state."""
    model = make_model(peers.rank)
    share_model(model, peers.dense)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for stage, holders in enumerate(HOLDERS):
        if peers.rank in holders:
            train_stage(model, optimizer, stage, differs=peers.rank != holders[0])
    share_stages(stages_of(model), optimizer, peers.dense, peers.gather)
    return [(dense_digest(model, optimizer), sorted(optimizer.state_dict()["state"])), train_alone(kind)]


@pytest.mark.parametrize(
    ("run", "kind"), [(run_peers, "adam"), *((run_threads, kind) for kind in OPTIMIZERS if kind != "adam")]
)
def test_all_ranks_get_every_stage_of_its_first_holder(run: Callable[..., list[Ended]], kind: str) -> None:
    ends = run(3, train, kind)
    assert [end.error for end in ends] == [None] * 3
    assert [end.value[0] for end in ends] == [ends[0].value[1]] * 3
