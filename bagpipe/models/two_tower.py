"""`TwoTower`: retrieval by vectors of users and items, with in-batch negatives. Needs no torchrec of its own.

    user features ─> bags ─> MLP ─> unit vectors u ─┐
                                                    ├─ scale * u v' [n, n] ─ log q ─> softmax: i should choose item i
    item features ─> bags ─> MLP ─> unit vectors v ─┘

The other items of the batch are the negatives. Popular items are negatives more often than others; `log_q`, the log of
the probability with which an item is in a batch, corrects for that. On several ranks the negatives are the rank's own.

Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations", RecSys 2019. The scale is
learned, as its logarithm; the paper's is a constant, 1 / temperature.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bagpipe.models.layers import mlp, pooled_width

__all__ = ["Tower", "TwoTower", "TwoTowerBatch"]


@dataclass
class TwoTowerBatch:
    """A batch of n examples.

    Attributes:
        user: KeyedJaggedTensor of the users' features.
        item: KeyedJaggedTensor of the items' features.
        log_q: ``[n]``, log of the probability with which the item is in a batch; zeros: no correction.
    """

    user: Any
    item: Any
    log_q: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> TwoTowerBatch:
        return TwoTowerBatch(
            *(getattr(self, field.name).to(device, non_blocking=non_blocking) for field in fields(self))
        )


class Tower(nn.Module):
    """Bags and an MLP over them: unit vectors ``[n, dim]``."""

    def __init__(self, embedding_bag_collection: nn.Module, hidden: Sequence[int], dim: int) -> None:
        super().__init__()
        self.bags = embedding_bag_collection
        self.mlp = mlp([pooled_width(embedding_bag_collection), *hidden], outputs=dim)

    def forward(self, features: Any) -> Tensor:
        return F.normalize(self.mlp(self.bags(features).values()))


class TwoTower(nn.Module):
    """``model(batch)`` returns the loss and the unit vectors of users and items, for a `TwoTowerBatch`.

    Args:
        user_bags, item_bags: collections that map the batch's features to KeyedTensors.
        dim: dimension of the vectors.
        hidden: hidden widths of each tower.
        scale: initial factor of the scores, 1 / temperature.
        item_id: name of an item feature with one id in each example. Examples with an equal id are no negatives of each
            other; empty: all are.
    """

    def __init__(
        self,
        user_bags: nn.Module,
        item_bags: nn.Module,
        *,
        dim: int,
        hidden: Sequence[int] = (64,),
        scale: float = math.exp(2),
        item_id: str = "",
    ) -> None:
        super().__init__()
        self.user, self.item = Tower(user_bags, hidden, dim), Tower(item_bags, hidden, dim)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.item_id = item_id

    def forward(self, batch: TwoTowerBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        users, items = self.user(batch.user), self.item(batch.item)
        scores = self.log_scale.exp() * users @ items.T - batch.log_q
        if self.item_id:
            ids = batch.item[self.item_id].values()
            is_same = ids[:, None] == ids
            scores = scores.masked_fill(is_same.fill_diagonal_(False), -math.inf)
        loss = F.cross_entropy(scores, torch.arange(len(users), device=scores.device))
        return loss, (users.detach(), items.detach())
