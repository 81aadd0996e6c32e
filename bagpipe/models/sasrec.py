"""`SASRec`: a causal transformer over a user's items predicts the next one. Needs no torchrec of its own.

    sequence ─> items + positions ─> blocks of causal attention and MLP ─> state of each position
    loss: the state should score the position's next item (``positive``) above a sampled one (``negative``)

The loader draws the negatives, so a batch names every row that it needs, and rows can be prefetched. Position vectors
are dense parameters.

Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, arXiv 1808.09781. Form: residuals as in the
paper, x + dropout(g(norm(x))); as in the authors' code, keys and values of the attention are not normalised.
Differences: projections have no bias, items are not scaled by the root of the dimension, and positions count from a
sequence's first item, where the authors pad in front and so count from its last.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "SASRec"]


class Block(nn.Module):
    """Causal self-attention, then an MLP; a residual connection around each."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """States ``[n, length, dim]``; `hidden` ``[length, length]`` marks the positions that a position ignores."""
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query(self.attention_norm(x)), self.key(x), self.value(x))
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        shares = self.dropout(scores.masked_fill(hidden, -math.inf).softmax(3))
        x = x + self.dropout((shares @ value).transpose(1, 2).flatten(2))
        x = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return x


class SASRec(nn.Module):
    """``model(batch)`` returns the loss and, for each position, whether the positive item scores higher (bool).

    A batch is a KeyedJaggedTensor with the features ``sequence`` (1 to `max_length` ids), ``positive`` and
    ``negative``, of equal lengths, which all read one table.

    Args:
        embedding_collection: maps a batch to a dict of JaggedTensors.
        dim: dimension of the table.
        max_length: longest sequence.
        num_blocks: number of blocks.
        num_heads: heads of the attention; a divisor of `dim`.
        dropout: share of the values that are zeroed in training: of inputs, attention and each residual.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        *,
        dim: int,
        max_length: int,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.items = embedding_collection
        self.positions = nn.Parameter(0.1 * torch.randn(max_length, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        vectors = self.items(batch)
        lengths, (longest, dim) = vectors["sequence"].lengths(), self.positions.shape
        # Padding stands behind a sequence, where no earlier position can see it.
        is_real = torch.arange(longest, device=lengths.device) < lengths[:, None]  # [n, max_length]
        padded = self.positions.new_zeros(len(lengths), longest, dim)
        x = padded.masked_scatter(is_real.unsqueeze(2), vectors["sequence"].values()) + self.positions
        hidden = torch.ones(longest, longest, dtype=torch.bool, device=x.device).triu(1)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, hidden)
        states = self.norm(x)[is_real]  # [ids, dim], in the order of the ids
        positive = (states * vectors["positive"].values()).sum(1)
        negative = (states * vectors["negative"].values()).sum(1)
        loss = (F.softplus(-positive) + F.softplus(negative)).mean()
        return loss, (positive > negative).detach()
