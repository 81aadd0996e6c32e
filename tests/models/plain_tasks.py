"""References of the models with several labels: the papers' formulas, example by example.

Parameters have the names of `bagpipe.models`, so that values can be copied; nothing else is shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.plain_fuxictr import layers, width_of

__all__ = ["PlainESMM", "PlainMMoE", "PlainPLE", "PlainTaskLogits"]


def inputs_of(bags: Any, batch: Mapping[str, Any]) -> Tensor:
    return torch.cat([bags(batch["sparse"]).values(), *([batch["dense"]] if "dense" in batch else [])], dim=1)


def logistic(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def weighted_mean(losses: Sequence[Tensor], batch: Mapping[str, Any]) -> Tensor:
    weights = batch.get("weight", torch.ones(len(losses), dtype=torch.float64))
    return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=True)]).sum() / len(losses)


def cross_entropies(chances: Tensor, labels: Tensor) -> list[Tensor]:
    return [-torch.log(p if label else 1 - p) for p, label in zip(chances, labels, strict=True)]


def mixture(scores: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Of one example."""
    shares = torch.exp(scores) / torch.exp(scores).sum()
    return torch.stack([share * output for share, output in zip(shares, outputs, strict=True)]).sum(0)


class PlainTaskLogits(nn.Module):
    """``model(dense, sparse)`` gives the logits ``[n, tasks]`` of a model of this file."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        chances: Tensor = torch.stack(self.model.chances({"dense": dense, "sparse": sparse}), dim=1)
        return torch.log(chances) - torch.log(1 - chances)


class PlainMMoE(nn.Module):
    def __init__(
        self,
        bags: Any,
        tasks: Mapping[str, float],
        num_dense: int,
        experts: int,
        widths: Sequence[int],
        tower: Sequence[int] = (3,),
    ) -> None:
        super().__init__()
        self.embeddings, self.tasks = bags, tasks
        width = width_of(bags) + num_dense
        self.experts = nn.ModuleList(layers([width, *widths]) for _ in range(experts))
        self.gates = nn.ModuleList(layers([width], outputs=experts) for _ in tasks)
        self.towers = nn.ModuleList(layers([widths[-1], *tower], outputs=1) for _ in tasks)

    def chances(self, batch: Mapping[str, Any]) -> list[Tensor]:
        x = inputs_of(self.embeddings, batch)
        found = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            rows = [mixture(gate(row), [expert(row) for expert in self.experts]) for row in x]
            found.append(torch.stack([logistic(tower(row)[0]) for row in rows]))
        return found

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for (task, weight), chances in zip(self.tasks.items(), self.chances(batch), strict=True):
            total = total + weight * weighted_mean(cross_entropies(chances, batch[task]), batch)
        return total


class PlainLevel(nn.Module):
    """One task's experts are `own`, the shared ones are `common`, in every level."""

    def __init__(self, width: int, tasks: int, own: int, common: int, out: int, *, is_last: bool) -> None:
        super().__init__()
        self.of_tasks = nn.ModuleList(nn.ModuleList(layers([width, out]) for _ in range(own)) for _ in range(tasks))
        self.shared = nn.ModuleList(layers([width, out]) for _ in range(common))
        self.gates = nn.ModuleList(nn.Linear(width, own + common) for _ in range(tasks))
        if not is_last:
            self.shared_gate = nn.Linear(width, tasks * own + common)


class PlainPLE(nn.Module):
    def __init__(
        self,
        bags: Any,
        tasks: Mapping[str, float],
        num_dense: int,
        levels: int,
        out: int,
        tower: Sequence[int] = (3,),
    ) -> None:
        super().__init__()
        self.embeddings, self.tasks = bags, tasks
        width = width_of(bags) + num_dense
        self.levels = nn.ModuleList(
            PlainLevel(out if level else width, len(tasks), 2, 1, out, is_last=level == levels - 1)
            for level in range(levels)
        )
        self.towers = nn.ModuleList(layers([out, *tower], outputs=1) for _ in tasks)

    def states_of(self, row: Tensor) -> list[Tensor]:
        """The last states of one example."""
        states, shared = [row] * len(self.tasks), row
        levels: Any = self.levels
        for level in levels:
            common = [expert(shared) for expert in level.shared]
            own = [[expert(state) for expert in experts] for experts, state in zip(level.of_tasks, states, strict=True)]
            states = [
                mixture(gate(state), [*outputs, *common])
                for gate, state, outputs in zip(level.gates, states, own, strict=True)
            ]
            if hasattr(level, "shared_gate"):
                shared = mixture(
                    level.shared_gate(shared), [*(output for outputs in own for output in outputs), *common]
                )
        return states

    def chances(self, batch: Mapping[str, Any]) -> list[Tensor]:
        rows = [self.states_of(row) for row in inputs_of(self.embeddings, batch)]
        return [
            torch.stack([logistic(tower(states[number])[0]) for states in rows])
            for number, tower in enumerate(self.towers)
        ]

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for (task, weight), chances in zip(self.tasks.items(), self.chances(batch), strict=True):
            total = total + weight * weighted_mean(cross_entropies(chances, batch[task]), batch)
        return total


class PlainESMM(nn.Module):
    def __init__(self, bags: Any, num_dense: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.embeddings = bags
        width = width_of(bags) + num_dense
        self.ctr, self.cvr = layers([width, *widths], outputs=1), layers([width, *widths], outputs=1)

    def chances(self, batch: Mapping[str, Any]) -> list[Tensor]:
        x = inputs_of(self.embeddings, batch)
        click, convert = logistic(self.ctr(x))[:, 0], logistic(self.cvr(x))[:, 0]
        return [click, click * convert]

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        click, converted = self.chances(batch)
        both = batch["click"] * batch["conversion"]
        first = weighted_mean(cross_entropies(click, batch["click"]), batch)
        return first + weighted_mean(cross_entropies(converted, both), batch)
