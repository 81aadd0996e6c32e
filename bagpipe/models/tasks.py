"""Inputs and losses of models with several labels, which compute their own loss.

    batch: {"sparse": KeyedJaggedTensor, "dense": [n, num_dense], "weight": [n], TASK: labels [n], …}
    forward(batch) ──> loss, {TASK: probabilities [n]}

``dense`` is read if the model has dense columns; ``weight``, the weight of each example in the loss, if it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["joined_inputs", "loss_and_outputs", "mix", "weighted_loss"]


def joined_inputs(embedding_bag_collection: nn.Module, dense: Tensor | None, sparse: Any, num_dense: int) -> Tensor:
    """``[n, width]``: the pooled vectors of all features, then the dense columns, which are read if there are any."""
    pooled: Tensor = embedding_bag_collection(sparse).values()
    return torch.cat([pooled, dense], dim=1) if num_dense and dense is not None else pooled


def mix(gate: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """``[n, width]``: the experts' outputs, each ``[n, width]``, weighted by the softmax of ``[n, experts]``."""
    return (gate.softmax(1).unsqueeze(2) * torch.stack(list(experts), dim=1)).sum(1)


def weighted_loss(logits: Tensor, labels: Tensor, batch: Mapping[str, Any]) -> Tensor:
    """Mean over the examples of weight times binary cross-entropy; without weights, each is 1."""
    return F.binary_cross_entropy_with_logits(logits, labels, weight=batch.get("weight"))


def loss_and_outputs(
    logits: Sequence[Tensor], tasks: Mapping[str, float], batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The tasks' losses added up, each times its weight, and their probabilities ``[n]``."""
    loss, outputs = logits[0].new_zeros(()), {}
    for (task, weight), values in zip(tasks.items(), logits, strict=True):
        loss = loss + weight * weighted_loss(values, batch[task], batch)
        outputs[task] = values.detach().sigmoid()
    return loss, outputs
