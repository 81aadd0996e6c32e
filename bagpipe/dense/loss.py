"""The loss: binary cross-entropy of logits, summed over the examples and over the heads of a model.

It is defined for the labels of `bagpipe.types.labels.LOSS_LABELS`; readers refuse others.

Rule of this file: *a loss is computed in the labels' dtype*, whatever the logits come in.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = ["as_heads", "summed_loss", "total_loss"]


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The binary cross-entropy of ``[num_examples]`` logits and labels, summed; a scalar of the labels' dtype."""
    return nn.functional.binary_cross_entropy_with_logits(logits.to(labels.dtype), labels, reduction="sum")


def as_heads(logits: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Each output of a model, ``[num_examples]`` or ``[num_examples, 1]``, as ``[num_examples]``."""
    heads = logits if isinstance(logits, (tuple, list)) else (logits,)
    return tuple(head.reshape(-1) for head in heads)


def total_loss(heads: Sequence[Tensor], labels: Tensor) -> Tensor:
    """The heads' losses added up in their order; all are taken for logits of the labels."""
    total = summed_loss(heads[0], labels)
    for head in heads[1:]:
        total = total + summed_loss(head, labels)
    return total
