"""A model of your own: a factorisation machine (pairwise interactions) beside a small tower.

python -m trainer --config trainer/configs/synthetic.toml --model.factory examples.own_model:build
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from bagpipe.config.sections import ModelConfig
from bagpipe.models.torchrec_models import embedding_bags, num_dense_inputs
from bagpipe.types.schema import DataSchema


class PairwiseModel(nn.Module):
    """The cache serves every torchrec embedding collection; all other parameters are dense."""

    def __init__(self, schema: DataSchema, config: ModelConfig) -> None:
        super().__init__()
        self.dim = config.embedding_dim
        self.embeddings = embedding_bags(schema, self.dim)  # on the meta device: its rows live in the store
        self.tower = nn.Sequential(nn.Linear(num_dense_inputs(schema) + self.dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Logits ``[num_examples, 1]``."""
        vectors = self.embeddings(sparse).values().view(len(dense), -1, self.dim)
        total = vectors.sum(1)
        pairs = 0.5 * (total.square() - vectors.square().sum(1))
        logits: Tensor = self.tower(torch.cat([dense, total], dim=1)) + pairs.sum(1, keepdim=True)
        return logits


def build(schema: DataSchema, config: ModelConfig) -> nn.Module:
    """The factory. Every rank calls it."""
    return PairwiseModel(schema, config)
