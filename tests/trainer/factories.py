"""Models of the user's own for `model.factory` that break the contract, each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from bagpipe.config.sections import ModelConfig
from bagpipe.models.torchrec_models import embedding_bags
from bagpipe.types.schema import DataSchema

__all__ = ["breaks_in_forward", "breaks_when_built", "called", "dotted", "items", "restless", "returning"]

Forward = Callable[[Tensor, Tensor], Any]


class Model(nn.Module):
    """Sparse vectors ``[n, width]`` and a norm, for a forward of one's choice."""

    def __init__(self, schema: DataSchema, config: ModelConfig, forward: Forward) -> None:
        super().__init__()
        self.bags = embedding_bags(schema, config.embedding_dim)
        self.norm = nn.BatchNorm1d(config.embedding_dim * len(schema.features))
        self.own_forward = forward

    def forward(self, dense: Tensor, sparse: Any) -> Any:
        return self.own_forward(dense, self.norm(self.bags(sparse).values()))


def returning(make: Forward) -> Callable[[DataSchema, ModelConfig], nn.Module]:
    """A factory of models with this forward."""
    return lambda schema, config: Model(schema, config, make)


def _divide(dense: Tensor, vectors: Tensor) -> Tensor:
    return vectors.sum(1) / (1 // 0)


breaks_in_forward = returning(_divide)
called = returning(lambda dense, vectors: vectors[:, :2])
restless = returning(lambda dense, vectors: torch.dropout(vectors, 0.5, True).sum(1) + torch.rand(1))


def breaks_when_built(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """Its last frame is this one."""
    return nn.Linear(len(schema.dense), {}["no such width"])


def named(name: str) -> Callable[[DataSchema, ModelConfig], nn.Module]:
    """A factory whose own collection has a table of this name."""

    def build(schema: DataSchema, config: ModelConfig) -> nn.Module:
        table = EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=10, feature_names=[schema.features[0].name]
        )
        model = Model(schema, config, lambda dense, vectors: vectors.sum(1))
        model.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        return model

    return build


items = named("items")
dotted = named("a.b")
