"""`DeepFM`: DeepFM as FuxiCTR and the BARS benchmark publish it. Needs no torchrec of its own.

    dense  ──NumericVectors──> vectors ─┬─ all pairs' dot products ──┐
    sparse ──bags──> first weights │    └─ MLP ─> linear ────────────┼─ sum + bias ─> logits
                     the others ───┘      first-order terms ─────────┘

The first weight of a row is its first-order term, the others are its vector: one row serves both. A table that several
features share has one first-order term for an id; FuxiCTR has one for each feature.

torchrec's `SimpleDeepFMNN` (``model.name = "deepfm"``) differs: an MLP turns all dense columns into one vector, there
are no first-order terms, and a linear layer joins the outputs.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017, arXiv 1703.04247.
Form: FuxiCTR's `DeepFM` (github.com/reczoo/FuxiCTR, model_zoo/DeepFM).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.models.layers import NumericVectors, mlp, pooled_width, reset_like_fuxictr

__all__ = ["DeepFM"]


class DeepFM(nn.Module):
    """``model(dense, sparse)`` returns logits ``[num_examples, 1]``.

    Args:
        embedding_bag_collection: maps `sparse` to a KeyedTensor; all tables have dimension ``dim + 1``.
        num_dense: number of dense columns; with 0, `dense` is not read.
        dim: dimension of the vectors.
        hidden: widths of the MLP.
        dropout: share of each hidden layer's values that are zeroed in training.
        batch_norm: batch norm in each hidden layer.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        num_dense: int,
        dim: int,
        hidden: Sequence[int],
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = embedding_bag_collection
        self.dim = dim
        self.numeric = NumericVectors(num_dense, dim) if num_dense else None
        self.numeric_first = NumericVectors(num_dense, 1) if num_dense else None
        self.bias = nn.Parameter(torch.zeros(1))
        num_fields = num_dense + pooled_width(embedding_bag_collection) // (dim + 1)
        self.deep = mlp([num_fields * dim, *hidden], dropout=dropout, batch_norm=batch_norm, outputs=1)
        reset_like_fuxictr(self)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        rows = self.embeddings(sparse).values()
        rows = rows.reshape(dense.shape[0], -1, self.dim + 1)
        first, vectors = torch.split(rows, [1, self.dim], dim=2)
        if self.numeric is not None and self.numeric_first is not None:
            first = torch.cat([self.numeric_first(dense), first], dim=1)
            vectors = torch.cat([self.numeric(dense), vectors], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        logits: Tensor = first.sum(1) + self.bias + pairs.sum(1, keepdim=True) + self.deep(vectors.flatten(1))
        return logits
