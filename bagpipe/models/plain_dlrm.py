"""`PlainDLRM`: the DLRM of Naumov et al. 2019 in plain torch, over any embedding bags. Needs no torchrec.

    dense ──bottom MLP──> [n, D] ─┬─ all pairs' dot products ─┐
    sparse ──bags──> [n, F, D] ───┘                           ├──> top MLP ──> logits [n, 1]
                     bottom's output ─────────────────────────┘

The arithmetic is that of `torchrec.models.dlrm.DLRM`: ReLU after every layer but the last, and the products of pairs
above the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PlainDLRM"]


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU; `widths` begins with the width of the input."""
    layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
    return nn.Sequential(*(layer for pair in layers for layer in pair))


class PlainDLRM(nn.Module):
    """``model(dense, sparse)`` returns logits ``[num_examples, 1]``.

    Args:
        bags: module that maps `sparse` to ``[num_examples, num_features * dim]``, such as `CachedBags`.
        num_dense: number of dense columns, at least 1.
        num_features: number of sparse features.
        dim: dimension of every feature's vector.
        bottom_mlp: layer widths between the dense input and `dim`.
        top_mlp: layer widths between the interactions and the logit.
    """

    pairs: Tensor

    def __init__(
        self,
        bags: nn.Module,
        *,
        num_dense: int,
        num_features: int,
        dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
    ) -> None:
        super().__init__()
        self.bags = bags
        self.bottom = _mlp([num_dense, *bottom_mlp, dim])
        vectors = num_features + 1
        # One index into the flattened products: the backward of `index_select` adds each element once, without a sort.
        row, column = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", row * vectors + column, persistent=False)
        num_interactions = dim + vectors * (vectors - 1) // 2
        self.top = _mlp([num_interactions, *top_mlp])
        self.head = nn.Linear([num_interactions, *top_mlp][-1], 1)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        bottom = self.bottom(dense)
        pooled = self.bags(sparse).view(len(bottom), -1, bottom.shape[1])
        vectors = torch.cat([bottom.unsqueeze(1), pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        interactions = torch.cat([bottom, products.index_select(1, self.pairs)], dim=1)
        logits: Tensor = self.head(self.top(interactions))
        return logits
