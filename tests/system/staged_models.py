"""Models for ``model.factory`` that exercise the stages: dropout, two heads, and models that stages must refuse."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import ModelConfig
from bagpipe.models.torchrec_models import embedding_bags, num_dense_inputs
from bagpipe.types.schema import DataSchema

__all__ = ["dropping", "mixing", "normalising", "sequences", "spare", "tied", "two_heads", "untraceable"]

_WIDTH = 6


class Trunk(nn.Module):
    """Three layers over pooled vectors and dense columns.

    Args:
        between: module after the first layer.
    """

    def __init__(self, schema: DataSchema, config: ModelConfig, between: nn.Module) -> None:
        super().__init__()
        self.bags = embedding_bags(schema, config.embedding_dim)
        taken = num_dense_inputs(schema) + config.embedding_dim * len(schema.features)
        self.first = nn.Linear(taken, _WIDTH)
        self.between = between
        self.second = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 1)

    def hidden(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """``[num_examples, width]``."""
        joined = torch.cat([dense, self.bags(sparse).values()], dim=1)
        return torch.relu(self.second(self.between(torch.relu(self.first(joined)))))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits ``[num_examples]``."""
        logits: Tensor = self.head(self.hidden(dense, sparse)).squeeze(1)
        return logits


class TwoHeads(Trunk):
    """Two tasks on one trunk."""

    def __init__(self, schema: DataSchema, config: ModelConfig) -> None:
        super().__init__(schema, config, nn.Tanh())
        self.other = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 1))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Two times logits."""
        hidden = self.hidden(dense, sparse)
        return self.head(hidden).squeeze(1), self.other(hidden)


class Mixing(nn.Module):
    """Subtracts the batch mean: depends on the batch through a function, not a module class."""

    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


class Looking(nn.Module):
    """Branches on tensor values, so it cannot be traced."""

    def forward(self, values: Tensor) -> Tensor:
        return values if values.sum() > 0 else -values


class Tied(Trunk):
    """Uses its second layer's weights again at the end."""

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        hidden = self.second(self.between(self.hidden(dense, sparse)))
        logits: Tensor = self.head(hidden).squeeze(1)
        return logits


class Sequences(nn.Module):
    """Applies parameters to unpooled vectors: a micro-batch of them is not a slice."""

    def __init__(self, schema: DataSchema, config: ModelConfig) -> None:
        super().__init__()
        name, dim = schema.features[0].name, config.embedding_dim
        table = EmbeddingConfig(
            name=schema.features[0].table, embedding_dim=dim, num_embeddings=1, feature_names=[name]
        )
        self.name = name
        self.rows = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.layer = nn.Linear(dim, 1)
        self.dense = nn.Linear(num_dense_inputs(schema), 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        jagged = self.rows(sparse)[self.name]
        pooled = torch.segment_reduce(self.layer(jagged.values()), "sum", lengths=jagged.lengths())
        logits: Tensor = (self.dense(dense) + pooled).squeeze(1)
        return logits


def dropping(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model with dropout of a third of its hidden values."""
    return Trunk(schema, config, nn.Dropout(0.3))


def spare(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model with a layer that no stage uses."""
    model = Trunk(schema, config, nn.Tanh())
    model.spare = nn.Linear(2, 2)
    return model


def two_heads(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model that returns a tuple of two logits."""
    return TwoHeads(schema, config)


def normalising(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model with a batch norm."""
    return Trunk(schema, config, nn.BatchNorm1d(_WIDTH))


def mixing(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model that mixes examples through a function."""
    return Trunk(schema, config, Mixing())


def untraceable(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model that branches on values."""
    return Trunk(schema, config, Looking())


def tied(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model that uses a layer twice."""
    return Tied(schema, config, nn.Linear(_WIDTH, _WIDTH))


def sequences(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """A model over unpooled vectors."""
    return Sequences(schema, config)
