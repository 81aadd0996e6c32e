"""`Loss`: the loss of logits, summed over the examples and over the heads of a model.

    bce           -(y * log p + (1 - y) * log(1 - p)),  p = sigmoid(logit)      binary_cross_entropy_with_logits
    weighted_bce  y * log p times pos_weight                                    the same with pos_weight
    focal         bce * (1 - q) ** gamma,  q = y * p + (1 - y) * (1 - p)        Lin et al., arXiv:1708.02002
                  times alpha for positives, 1 - alpha for negatives            as torchvision's sigmoid_focal_loss

Label smoothing turns y into ``y * (1 - s) + s / 2`` first. Every loss is defined for the labels of
`bagpipe.types.labels.LOSS_LABELS`; readers refuse others.

    loss of a batch = 1 / n * sum over heads h of head_weight_h * sum over examples i of weight_i * loss(logit_hi, y_hi)

The mean is over the n examples of the global batch, as that of torch's losses with `weight` and of Keras: an example of
weight 2 counts like two equal ones, and one of weight 0 adds nothing but counts in n. It is no mean over the sum of the
weights, which would make an example's gradient depend on the weights of the others in its batch.

Rule of this file: *a loss is computed in the labels' dtype*, whatever the logits come in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["BCE", "LOSSES", "Loss", "as_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a model that is trained.

    Attributes:
        name: a key of `LOSSES`.
        label_smoothing: s, at least 0 and below 1.
        pos_weight: of weighted_bce.
        gamma: of focal, 0 or at least 1: between them the gradient of a sure score is not a number.
        alpha: of focal; 0: examples have equal weights.
        num_labels: labels of an example. With several, each is that of the head with its number; one is that of every
            head.
        is_weighted: examples have weights.
        head_weights: factors of the heads' losses; empty: 1 each.
    """

    name: str = "bce"
    label_smoothing: float = 0.0
    pos_weight: float = 1.0
    gamma: float = 2.0
    alpha: float = 0.25
    num_labels: int = 1
    is_weighted: bool = False
    head_weights: tuple[float, ...] = ()

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of one example's targets (`bagpipe.types.batch.Batch.targets`)."""
        columns = self.num_labels + self.is_weighted
        return () if columns == 1 else (columns,)

    def summed(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The loss of ``[num_examples]`` logits and labels, each times its weight, summed; of the labels' dtype."""
        if self.label_smoothing:
            labels = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        return LOSSES[self.name](self, logits.to(labels.dtype), labels, weights)

    def of_head(self, number: int, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of one head's logits ``[num_examples]``, summed, times the head's weight.

        Args:
            number: of the head.
            logits: its logits.
            targets: ``[num_examples, *target_shape]``: labels, then the weights if there are any.
        """
        columns = (targets,) if targets.dim() == 1 else targets.unbind(1)
        labels = columns[number if self.num_labels > 1 else 0]
        total = self.summed(logits, labels, columns[-1] if self.is_weighted else None)
        return total * self.head_weights[number] if self.head_weights else total

    def total(self, heads: Sequence[Tensor], targets: Tensor) -> Tensor:
        """The heads' losses added up in their order. Args: see `of_head`."""
        total = self.of_head(0, heads[0], targets)
        for number, head in enumerate(heads[1:], start=1):
            total = total + self.of_head(number, head, targets)
        return total


def _bce(loss: Loss, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="sum")


def _weighted_bce(loss: Loss, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    factor = torch.full((), loss.pos_weight, dtype=labels.dtype, device=labels.device)
    return nn.functional.binary_cross_entropy_with_logits(
        logits, labels, weight=weights, pos_weight=factor, reduction="sum"
    )


def _focal(loss: Loss, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    p = torch.sigmoid(logits)
    each = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    each = each * (1 - (p * labels + (1 - p) * (1 - labels))) ** loss.gamma
    if loss.alpha:
        each = each * (loss.alpha * labels + (1 - loss.alpha) * (1 - labels))
    return (each if weights is None else each * weights).sum()


#: Name -> the summed loss of logits, labels and weights of one dtype.
LOSSES: Mapping[str, Callable[[Loss, Tensor, Tensor, Tensor | None], Tensor]] = {
    "bce": _bce,
    "weighted_bce": _weighted_bce,
    "focal": _focal,
}

#: Binary cross-entropy, the loss that evaluation reports.
BCE = Loss()


def as_heads(logits: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each output of a model, ``[num_examples]`` or ``[num_examples, 1]``, as ``[num_examples]``."""
    heads = logits if isinstance(logits, (tuple, list)) else (logits,)
    return tuple(head.reshape(-1) for head in heads)
