"""Unpooled vectors in float64, for comparison with references that read the tables themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["Vectors", "jagged"]


class Vectors(nn.Module):
    """Called like torchrec's `EmbeddingCollection`; ``tables``: feature -> number of its table."""

    def __init__(self, features: dict[str, int], dim: int) -> None:
        super().__init__()
        self.features = features
        self.tables = nn.ModuleList(
            nn.Embedding(9, dim, dtype=torch.float64) for _ in range(1 + max(features.values()))
        )

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        bags = batch.to_dict()
        return {
            name: JaggedTensor(values=self.tables[table](bags[name].values()), lengths=bags[name].lengths())
            for name, table in self.features.items()
        }

    def of(self, feature: str, ids: list[int]) -> list[Any]:
        """The rows of some ids."""
        weight: Any = self.tables[self.features[feature]].weight
        return [weight[number] for number in ids]


def jagged(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    """A batch of bags of ids, by feature."""
    every = [bag for of_feature in bags.values() for bag in of_feature]
    return KeyedJaggedTensor(
        keys=list(bags),
        values=torch.tensor([number for bag in every for number in bag]),
        lengths=torch.tensor([len(bag) for bag in every]),
    )
