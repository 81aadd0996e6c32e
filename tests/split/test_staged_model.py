from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from bagpipe.errors import ScheduleError
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue


def value(name: str, producer: int, consumers: tuple[int, ...], *, wants_grad: bool = True) -> StageValue:
    return StageValue(
        name=name, producer=producer, consumers=consumers, shape=(2,), dtype=torch.float32, wants_grad=wants_grad
    )


def make_staged() -> StagedModel:
    """A fork: stage 0 feeds 1 and 2. Both have a head, and 2 takes vectors of the embedding stage, too."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    return StagedModel(
        model=model,
        embedding=nn.Identity(),
        stages=(
            StageModule(name="trunk", module=model[0], inputs=(0,), outputs=(2,)),
            StageModule(name="left", module=model[1], inputs=(2,), outputs=(3,), heads=((1, 3),)),
            StageModule(name="right", module=model[2], inputs=(1, 2), outputs=(4,), heads=((0, 4),)),
        ),
        values=(
            value("dense", 3, (0,), wants_grad=False),
            value("pooled", 3, (2,)),
            value("joint", 0, (1, 2)),
            value("click", 1, ()),
            value("buy", 2, ()),
        ),
    )


def test_edges_come_from_the_values() -> None:
    staged = make_staged()
    assert staged.embedding_values == (0, 1)
    assert staged.edges == ((0, 1), (0, 2))
    # Labels go to both stages with a loss; gradients come back only from the stage that takes vectors.
    assert staged.embedding_edges == ((0, False), (1, False), (2, True))


def test_the_graph_has_the_stages_names_and_micro_batches() -> None:
    graph = make_staged().graph(4)
    assert graph.names == ("trunk", "left", "right")
    assert graph.micro_per_batch == (4, 4, 4)
    assert graph.depths == (2, 1, 1)


def test_stages_that_do_not_fit_together_are_refused() -> None:
    staged = make_staged()
    trunk, left, right = staged.stages
    with pytest.raises(ScheduleError, match="stage 1 has no path to a loss; loss stages are 2"):
        replace(staged, stages=(trunk, replace(left, heads=()), right)).graph(1)
    with pytest.raises(ScheduleError, match="edge 0-1 carries joint, which stage 0 does not produce; it has nothing"):
        replace(staged, stages=(replace(trunk, outputs=()), left, right)).graph(1)
    unknown = replace(staged, values=(*staged.values[:2], value("joint", 0, (2,)), *staged.values[3:]))
    with pytest.raises(ScheduleError, match="stage 1 takes joint of stage 0; there is no such edge"):
        unknown.graph(1)


def test_parameters_are_named_as_in_the_model_and_trainable() -> None:
    staged = make_staged()
    assert [name for name, _ in staged.parameters_of(0)] == ["0.weight", "0.bias"]
    assert [name for name, _ in staged.parameters_of(1)] == ["1.weight"]
