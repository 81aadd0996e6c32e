"""`FinalMLP`: two MLPs over the same fields, joined by a bilinear form, after an optional gate for each.

    dense  ──NumericVectors──┐             ┌─ * gate 1 ─> MLP 1 ─> o1 ─┐
    sparse ──bags────────────┴─ x [n, W] ──┴─ * gate 2 ─> MLP 2 ─> o2 ─┴─> logits
    logits = b1 + w1 · o1 + b2 + w2 · o2 + sum over heads h of  o1[h] · W[h] · o2[h]
    gate   = 2 sigmoid(MLP(vectors of the gate's context))            [n, W]

A gate has vectors of its own for the features of its context; without a context it reads one learned vector.

Mao et al., "FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction", AAAI 2023, arXiv 2304.00902. Form:
FuxiCTR's `FinalMLP` (github.com/reczoo/FuxiCTR, model_zoo/FinalMLP). Needs no torchrec of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError
from bagpipe.models.layers import NumericVectors, mlp, pooled_width, reset_like_fuxictr

__all__ = ["BilinearFusion", "FeatureGate", "FinalMLP"]


class FeatureGate(nn.Module):
    """Factors between 0 and 2 for the fields' values, from a context of chosen features.

    Args:
        embedding_bag_collection: of the context's sparse features, with tables of its own; None: none.
        columns: numbers of the context's dense columns.
        dim: dimension of a dense column's vector, and of the learned vector of an empty context.
        hidden: widths of the gate's MLP.
        outputs: number of factors, W.
    """

    columns: Tensor

    def __init__(
        self,
        embedding_bag_collection: nn.Module | None,
        columns: Sequence[int] = (),
        *,
        dim: int,
        hidden: Sequence[int],
        outputs: int,
    ) -> None:
        super().__init__()
        self.embeddings = embedding_bag_collection
        self.register_buffer("columns", torch.tensor(columns, dtype=torch.int64), persistent=False)
        self.numeric = NumericVectors(len(columns), dim) if columns else None
        width = len(columns) * dim
        width += pooled_width(embedding_bag_collection) if embedding_bag_collection is not None else 0
        self.constant = None if width else nn.Parameter(torch.zeros(dim))
        self.factors = mlp([width or dim, *hidden], outputs=outputs)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        """``[num_examples, outputs]``."""
        parts = []
        if self.constant is not None:
            parts.append(self.constant.expand(dense.shape[0], -1))
        if self.numeric is not None:
            parts.append(self.numeric(dense.index_select(1, self.columns)).flatten(1))
        if self.embeddings is not None:
            parts.append(self.embeddings(sparse).values())
        return 2 * torch.sigmoid(self.factors(torch.cat(parts, dim=1)))


class BilinearFusion(nn.Module):
    """A linear form of both inputs plus a bilinear form in each of `heads` slices of them."""

    def __init__(self, first: int, second: int, heads: int) -> None:
        super().__init__()
        if first % heads or second % heads:
            raise InputError(f"FinalMLP: {heads} heads must divide the last widths of both MLPs, got {first}, {second}")
        self.heads = heads
        self.first, self.second = nn.Linear(first, 1), nn.Linear(second, 1)
        num_weights = first * second // heads
        weight = torch.randn(heads, first // heads, second // heads) * math.sqrt(2 / (num_weights + 1))
        self.weight = nn.Parameter(weight)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """``[num_examples, 1]``."""
        left = torch.einsum("nhi,hij->nhj", first.reshape(first.shape[0], self.heads, -1), self.weight)
        bilinear = (left.flatten(1) * second).sum(1, keepdim=True)
        fused: Tensor = self.first(first) + self.second(second) + bilinear
        return fused


class FinalMLP(nn.Module):
    """``model(dense, sparse)`` returns logits ``[num_examples, 1]``.

    Args:
        embedding_bag_collection: maps `sparse` to a KeyedTensor; its tables may differ in dimension.
        num_dense: number of dense columns; with 0, they are not read.
        dim: dimension of a dense column's vector.
        hidden: widths of the two MLPs, each at least one.
        heads: slices of the bilinear form; divides the last widths.
        dropout: of the two MLPs: share of each hidden layer's values that are zeroed in training.
        batch_norm: batch norm in each hidden layer.
        gates: one for each MLP, with W = ``num_dense * dim`` plus the collection's width; None: no gates.

    Raises:
        InputError: `heads` does not divide the last widths.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        num_dense: int,
        dim: int,
        hidden: tuple[Sequence[int], Sequence[int]],
        heads: int = 1,
        dropout: tuple[float, float] = (0.0, 0.0),
        batch_norm: bool = False,
        gates: tuple[FeatureGate, FeatureGate] | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = embedding_bag_collection
        self.numeric = NumericVectors(num_dense, dim) if num_dense else None
        width = num_dense * dim + pooled_width(embedding_bag_collection)
        self.gates = None if gates is None else nn.ModuleList(gates)
        self.streams = nn.ModuleList(
            mlp([width, *widths], dropout=share, batch_norm=batch_norm)
            for widths, share in zip(hidden, dropout, strict=True)
        )
        self.fusion = BilinearFusion(hidden[0][-1], hidden[1][-1], heads)
        reset_like_fuxictr(self)

    def forward(self, dense: Tensor, sparse: Any) -> Tensor:
        x = self.embeddings(sparse).values()
        if self.numeric is not None:
            x = torch.cat([self.numeric(dense).flatten(1), x], dim=1)
        inputs = (x, x) if self.gates is None else [x * gate(dense, sparse) for gate in self.gates]
        first, second = (stream(part) for stream, part in zip(self.streams, inputs, strict=True))
        logits: Tensor = self.fusion(first, second)
        return logits
