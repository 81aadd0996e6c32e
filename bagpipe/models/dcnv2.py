"""`DCNv2`: DCN-v2 as FuxiCTR and the BARS benchmark publish it. Needs no torchrec of its own.

    dense  ──NumericVectors──┐               ┌─ cross layers ──┐
    sparse ──bags────────────┴─ x0 [n, W] ───┴─ MLP ───────────┴─ linear ─> logits        structure "parallel"
                                x0 ─> cross layers ─> MLP ─> linear ─> logits             structure "stacked"

    cross layer:  x' = x + x0 * (W x + b),  W of full rank

torchrec's `DLRM_DCN` (``model.name = "dcnv2"``) differs: an MLP turns all dense columns into one vector, W has a low
rank, and nothing runs beside the cross layers.

Wang et al., "DCN V2: Improved Deep & Cross Network", WWW 2021, arXiv 2008.13535. Form: FuxiCTR's `DCNv2`
(github.com/reczoo/FuxiCTR, model_zoo/DCNv2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bagpipe.models.layers import NumericVectors, mlp, pooled_width, reset_like_fuxictr

__all__ = ["CrossLayers", "DCNv2"]


class CrossLayers(nn.Module):
    """Full-rank cross layers of DCN-v2, each ``x + x0 * (W x + b)``."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, x0: Tensor) -> Tensor:
        """``[num_examples, width]`` of the same shape."""
        x = x0
        for layer in self.layers:
            x = x + x0 * layer(x)
        return x


class DCNv2(nn.Module):
    """``model(dense, sparse)`` returns logits ``[num_examples, 1]``.

    Args:
        embedding_bag_collection: maps `sparse` to a KeyedTensor; its tables may differ in dimension.
        num_dense: number of dense columns; with 0, `dense` is not read.
        dim: dimension of a dense column's vector.
        hidden: widths of the MLP, at least one.
        cross_layers: number of cross layers.
        structure: ``parallel``: the MLP reads x0 beside the cross layers; ``stacked``: it reads their output.
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
        cross_layers: int = 3,
        structure: Literal["parallel", "stacked"] = "parallel",
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = embedding_bag_collection
        self.numeric = NumericVectors(num_dense, dim) if num_dense else None
        width = num_dense * dim + pooled_width(embedding_bag_collection)
        self.cross = CrossLayers(width, cross_layers)
        self.deep = mlp([width, *hidden], dropout=dropout, batch_norm=batch_norm)
        self.is_stacked = structure == "stacked"
        self.head = nn.Linear(hidden[-1] if self.is_stacked else width + hidden[-1], 1)
        reset_like_fuxictr(self)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        x0 = self.embeddings(sparse).values()
        if self.numeric is not None:
            x0 = torch.cat([self.numeric(dense).flatten(1), x0], dim=1)
        crossed = self.cross(x0)
        last = self.deep(crossed) if self.is_stacked else torch.cat([crossed, self.deep(x0)], dim=1)
        logits: Tensor = self.head(last)
        return logits
