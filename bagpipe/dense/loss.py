"""`Loss`: the loss of logits, summed over the examples and over the heads of a model.

    bce           -(y * log p + (1 - y) * log(1 - p)),  p = sigmoid(logit)      binary_cross_entropy_with_logits
    weighted_bce  y * log p times pos_weight                                    the same with pos_weight
    focal         bce * (1 - q) ** gamma,  q = y * p + (1 - y) * (1 - p)        Lin et al., arXiv:1708.02002
                  times alpha for positives, 1 - alpha for negatives            as torchvision's sigmoid_focal_loss

Label smoothing turns y into ``y * (1 - s) + s / 2`` first. Every loss is defined for the labels of
`bagpipe.types.labels.LOSS_LABELS`; readers refuse others.

Rule of this file: *a loss is computed in the labels' dtype*, whatever the logits come in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["BCE", "LOSSES", "Loss", "as_heads", "summed_loss", "total_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a model that is trained.

    Attributes:
        name: a key of `LOSSES`.
        label_smoothing: s, at least 0 and below 1.
        pos_weight: of weighted_bce.
        gamma: of focal, 0 or at least 1: between them the gradient of a sure score is not a number.
        alpha: of focal; 0: examples have equal weights.
    """

    name: str = "bce"
    label_smoothing: float = 0.0
    pos_weight: float = 1.0
    gamma: float = 2.0
    alpha: float = 0.25

    def summed(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of ``[num_examples]`` logits and labels, summed; a scalar of the labels' dtype."""
        if self.label_smoothing:
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        return LOSSES[self.name](self, logits.to(labels.dtype), labels)

    def total(self, heads: Sequence[Tensor], labels: Tensor) -> Tensor:
        """The heads' losses added up in their order; all are taken for logits of the labels."""
        total = self.summed(heads[0], labels)
        for head in heads[1:]:
            total = total + self.summed(head, labels)
        return total


def _bce(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _weighted_bce(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.full((), loss.pos_weight, dtype=labels.dtype, device=labels.device)
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, pos_weight=weight, reduction="sum")


def _focal(loss: Loss, logits: Tensor, labels: Tensor) -> Tensor:
    p = torch.sigmoid(logits)
    each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    each = each * (1 - (p * labels + (1 - p) * (1 - labels))) ** loss.gamma
    if loss.alpha:
        each = each * (loss.alpha * labels + (1 - loss.alpha) * (1 - labels))
    return each.sum()


#: Name -> the summed loss of logits and labels of one dtype.
LOSSES: Mapping[str, Callable[[Loss, Tensor, Tensor], Tensor]] = {
    "bce": _bce,
    "weighted_bce": _weighted_bce,
    "focal": _focal,
}

#: Binary cross-entropy, the loss that evaluation reports.
BCE = Loss()


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """`BCE` of ``[num_examples]`` logits and labels, summed."""
    return BCE.summed(logits, labels)


def as_heads(logits: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each output of a model, ``[num_examples]`` or ``[num_examples, 1]``, as ``[num_examples]``."""
    heads = logits if isinstance(logits, (tuple, list)) else (logits,)
    return tuple(head.reshape(-1) for head in heads)


def total_loss(heads: Sequence[Tensor], labels: Tensor) -> Tensor:
    """`BCE` of all heads."""
    return BCE.total(heads, labels)
