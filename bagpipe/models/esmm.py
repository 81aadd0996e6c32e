"""`ESMM`: conversions after clicks, trained on all impressions. Two towers over shared bags. Needs no torchrec itself.

    features ─> bags ─┬─> MLP ─> pCTR ──┬───────────> loss of the clicks
                      └─> MLP ─> pCVR ──┴─ product ─> loss of the conversions, among all impressions

Without the product pCVR would be trained on clicked examples only, and used on all.

Ma et al., "Entire Space Multi-Task Model: An Effective Approach for Estimating Post-Click Conversion Rate", SIGIR 2018,
arXiv 1804.07931. Form: the paper's; the product's logarithm is computed from both logits, exactly for large values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bagpipe.models.layers import mlp, pooled_width
from bagpipe.models.tasks import joined_inputs, weighted_loss

__all__ = ["ESMM"]


class ESMM(nn.Module):
    """``model(batch)`` returns the loss and a dict of ``ctr``, ``cvr`` and ``ctcvr`` -> probabilities ``[n]``.

    Batches are as in `bagpipe.models.tasks`. A conversion counts if the example was clicked.

    Args:
        embedding_bag_collection: maps ``batch["sparse"]`` to a KeyedTensor.
        click, conversion: keys of the labels in a batch.
        num_dense: number of dense columns.
        tower_mlp: widths of a tower before its logit.
        conversion_weight: weight of the second loss.
        dropout, batch_norm: of all hidden layers; see `bagpipe.models.layers.mlp`.
    """

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        *,
        click: str = "click",
        conversion: str = "conversion",
        num_dense: int = 0,
        tower_mlp: Sequence[int] = (64, 32),
        conversion_weight: float = 1.0,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings, self.num_dense = embedding_bag_collection, num_dense
        self.click, self.conversion, self.conversion_weight = click, conversion, conversion_weight
        width = pooled_width(embedding_bag_collection) + num_dense
        self.ctr = mlp([width, *tower_mlp], outputs=1, dropout=dropout, batch_norm=batch_norm)
        self.cvr = mlp([width, *tower_mlp], outputs=1, dropout=dropout, batch_norm=batch_norm)

    def logits(self, dense: Tensor | None, sparse: Any) -> tuple[Tensor, Tensor]:
        """Logits ``[n]`` of a click, and of a click with a conversion."""
        click, convert = self._towers(dense, sparse)
        return click, -_odds_against_both(click, convert)

    def _towers(self, dense: Tensor | None, sparse: Any) -> tuple[Tensor, Tensor]:
        """Logits ``[n]`` of a click, and of a conversion after one."""
        inputs = joined_inputs(self.embeddings, dense, sparse, self.num_dense)
        return self.ctr(inputs).squeeze(1), self.cvr(inputs).squeeze(1)

    def forward(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        click, convert = self._towers(batch.get("dense"), batch["sparse"])
        labels = batch[self.click]
        both = labels * batch[self.conversion]
        log_both = F.logsigmoid(click) + F.logsigmoid(convert)
        log_not_both = _odds_against_both(click, convert) + log_both
        losses = -(both * log_both + (1 - both) * log_not_both)
        weights = batch.get("weight")
        loss = weighted_loss(click, labels, batch)
        loss = loss + self.conversion_weight * (losses if weights is None else weights * losses).mean()
        outputs = {"ctr": click.sigmoid(), "cvr": convert.sigmoid(), "ctcvr": log_both.exp()}
        return loss, {name: value.detach() for name, value in outputs.items()}


def _odds_against_both(first: Tensor, second: Tensor) -> Tensor:
    """log((1 - p) / p), where p = sigmoid(first) * sigmoid(second): the logarithm of e^-a + e^-b + e^-(a + b)."""
    return torch.logsumexp(-torch.stack([first, second, first + second]), dim=0)
