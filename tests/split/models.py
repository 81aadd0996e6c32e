"""Small handmade staged models: every shape of graph that a runtime must support."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bagpipe.dense.seeding import seeded
from bagpipe.split.staged_model import StagedModel, StageModule, StageValue

__all__ = ["MODELS", "WIDTH", "make"]

WIDTH = 6
NUM_DENSE = 3
NUM_IDS = 20


class Rows(nn.Module):
    """The embedding stage: two pooled vectors per example, and the unchanged dense inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(NUM_IDS, 2 * WIDTH, mode="sum")

    def forward(self, dense: Tensor, sparse: Tensor) -> tuple[Tensor, ...]:
        first, second = self.rows(sparse).split(WIDTH, 1)
        return dense, first, second


class Node(nn.Module):
    """A stage: concatenated inputs, a layer, a nonlinearity. Each output is a slice of the result."""

    def __init__(self, width: int, outputs: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH * outputs)
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.layer(torch.cat(inputs, 1)))
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        return (hidden,) if self.outputs == 1 else hidden.split(WIDTH, 1)


class Top(nn.Module):
    """A stage with a loss: logits, and the hidden values if `passes_on`."""

    def __init__(self, width: int, passes_on: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(width, WIDTH)
        self.logit = nn.Linear(WIDTH, 1)
        self.passes_on = passes_on

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.layer(torch.cat(inputs, 1)))
        logits = self.logit(hidden).squeeze(1)
        return (logits, hidden) if self.passes_on else (logits,)


class Aside(nn.Module):
    """Has weights that no input with a gradient meets: half of the outputs depends only on the dense inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(NUM_DENSE, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(1, 1)

    def forward(self, dense: Tensor, pooled: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(self.dense(dense)), self.layer(pooled)


class Reused(nn.Module):
    """Uses a layer three times; the order in which its gradient terms are summed is that of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        hidden = [torch.tanh(self.layer(value)) for value in inputs]
        total = hidden[0]
        for value in hidden[1:]:
            total = total * value + self.layer(value)
        return (total,)


class Whole(nn.Module):
    """The whole model."""

    def __init__(self, embedding: nn.Module, stages: Sequence[StageModule]) -> None:
        super().__init__()
        self.embedding = embedding
        self.modules_by_stage = nn.ModuleList([stage.module for stage in stages])
        self._stages = stages

    def forward(self, dense: Tensor, sparse: Tensor) -> tuple[Tensor, ...]:
        values: dict[int, Tensor] = dict(enumerate(self.embedding(dense, sparse)))
        heads: dict[int, Tensor] = {}
        for stage in self._stages:
            values.update(zip(stage.outputs, stage.module(*(values[n] for n in stage.inputs)), strict=True))
            heads.update((head, values[n]) for head, n in stage.heads)
        return tuple(heads[head] for head in sorted(heads))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Inputs and outputs of a stage. A head is ``logit<n>``; the embedding stage makes dense, first, second."""

    takes: tuple[str, ...]
    makes: tuple[str, ...]
    module: Callable[[], nn.Module]
    uses_random: bool = False


def _node(*takes: str, makes: str, dropout: float = 0.0) -> Plan:
    names = tuple(makes.split())
    width = sum(NUM_DENSE if name == "dense" else WIDTH for name in takes)
    return Plan(takes=takes, makes=names, module=lambda: Node(width, len(names), dropout), uses_random=dropout > 0)


def _top(*takes: str, makes: str = "logit0") -> Plan:
    names = tuple(makes.split())
    width = sum(NUM_DENSE if name == "dense" else WIDTH for name in takes)
    return Plan(takes=takes, makes=names, module=lambda: Top(width, len(names) > 1))


def _chain(length: int, dropout: float = 0.0) -> list[Plan]:
    """Pooled vectors join the hidden values at the second stage, as in a DLRM."""
    plans = [_node("dense", makes="h0", dropout=dropout)]
    for number in range(1, length - 1):
        extra = ("first",) if number == 1 else ()
        plans.append(_node(f"h{number - 1}", *extra, makes=f"h{number}", dropout=dropout))
    return [*plans, _top(f"h{length - 2}", "second")]


#: Name -> stages.
MODELS: Mapping[str, list[Plan]] = {
    "one": [_top("dense", "first", "second")],
    "chain2": _chain(2),
    "chain3": _chain(3),
    "chain4": _chain(4),
    "plain2": [_node("dense", makes="h0"), _top("h0")],
    "plain4": [_node("dense", makes="h0"), _node("h0", makes="h1"), _node("h1", makes="h2"), _top("h2")],
    "dropout": _chain(4, dropout=0.5),
    "diamond": [
        _node("dense", "first", makes="a b"),
        _node("a", "second", makes="c"),
        _node("a", "b", makes="d e"),
        _top("c", "d", "e", "a"),
    ],
    "skips": [
        _node("dense", "first", makes="a"),
        _node("a", "second", makes="b"),
        _node("a", "b", makes="c"),
        _top("a", "b", "c", "second"),
    ],
    "branches": [
        *(_node(("first", "second", "dense")[n % 3], makes=f"b{n}") for n in range(7)),
        _top(*(f"b{n}" for n in range(7))),
    ],
    "two-heads": [
        _node("dense", "first", makes="a"),
        _top("a", makes="logit1 p"),
        _node("a", "second", makes="b"),
        _top("b", "p"),
    ],
    "aside": [
        Plan(takes=("dense", "first"), makes=("a", "b"), module=Aside),
        Plan(takes=("a", "b", "second"), makes=("c",), module=Reused),
        _node("c", makes="d"),
        _top("d", "b"),
    ],
}


def make(name: str) -> StagedModel:
    """The model in float64, always with the same weights. Thread-safe: the random generator is global."""
    with seeded(7, torch.device("cpu")):
        return _make(MODELS[name])


def _make(plans: Sequence[Plan]) -> StagedModel:
    names = ["dense", "first", "second", *(made for plan in plans for made in plan.makes)]
    number = {name: place for place, name in enumerate(names)}
    makers = {made: stage for stage, plan in enumerate(plans) for made in plan.makes}
    values = tuple(
        StageValue(
            name=value,
            producer=makers.get(value, len(plans)),
            consumers=tuple(stage for stage, plan in enumerate(plans) if value in plan.takes),
            shape=() if value.startswith("logit") else (NUM_DENSE if value == "dense" else WIDTH,),
            dtype=torch.float64,
            wants_grad=value != "dense" and any(value in plan.takes for plan in plans),
        )
        for value in names
    )
    stages = tuple(
        StageModule(
            name=f"stage{stage}",
            module=plan.module().double(),
            inputs=tuple(number[value] for value in plan.takes),
            outputs=tuple(number[value] for value in plan.makes),
            heads=tuple((int(made[5:]), number[made]) for made in plan.makes if made.startswith("logit")),
            uses_random=plan.uses_random,
        )
        for stage, plan in enumerate(plans)
    )
    embedding = Rows().double()
    return StagedModel(model=Whole(embedding, stages), embedding=embedding, stages=stages, values=values)
