"""`DIN`: Deep Interest Network. The target item attends over the user's behaviour. Needs no torchrec of its own.

    target ─┬──────────────────────────────────────────┐
    history ┴─ [h, t, h - t, h * t] ─> MLP ─> weights ─┴─> [sum of weight * h, t, others] ─> MLP ─> click

Target and history usually read one table: a row gets the gradient of both, and one update. No history is padded, and
empty ones are allowed.

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018, arXiv 1706.06978. Form: the paper's
weights, which are not normalised, and PReLU; the attention's inputs are those of the authors' code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["DIN"]


def _prelu_mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers with PReLU between them."""
    layers = [layer for before, after in pairwise(widths) for layer in (nn.Linear(before, after), nn.PReLU())]
    return nn.Sequential(*layers[:-1])


class DIN(nn.Module):
    """``model((features, labels))`` returns the loss and the probabilities ``[n]``.

    Args:
        embedding_collection: maps `features` to a dict of JaggedTensors.
        dim: dimension of its tables.
        target: name of the feature with the item to be scored, one id in each example.
        history: name of the feature with the user's former items.
        others: names of further features, one id in each example.
        attention_mlp: hidden widths of the attention.
        top_mlp: hidden widths of the last MLP.
    """

    def __init__(
        self,
        embedding_collection: nn.Module,
        *,
        dim: int,
        target: str = "target",
        history: str = "history",
        others: Sequence[str] = (),
        attention_mlp: Sequence[int] = (36,),
        top_mlp: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        self.embeddings = embedding_collection
        self.target, self.history, self.others = target, history, tuple(others)
        self.attention = _prelu_mlp([4 * dim, *attention_mlp, 1])
        self.top = _prelu_mlp([(2 + len(self.others)) * dim, *top_mlp, 1])

    def forward(self, batch: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
        features, labels = batch
        vectors = self.embeddings(features)
        target = vectors[self.target].values()  # [n, dim]
        history = vectors[self.history].values()  # [ids of all examples, dim]
        lengths = vectors[self.history].lengths()
        example = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        targets = target.index_select(0, example)
        pairs = torch.cat([history, targets, history - targets, history * targets], dim=1)
        interest = torch.zeros_like(target).index_add(0, example, self.attention(pairs) * history)
        parts = [interest, target, *(vectors[name].values() for name in self.others)]
        logits = self.top(torch.cat(parts, dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels), logits.detach().sigmoid()
