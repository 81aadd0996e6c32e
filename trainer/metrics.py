"""Quality of held-out predictions: AUC and normalised entropy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["BinaryMetrics"]


class BinaryMetrics:
    """Collects scores, 8 B per held-out example, on the host; both metrics need all of them at once."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Logits and labels ``[n]`` of one batch."""
        self._scores.append(logits.sigmoid().float().cpu())
        self._labels.append(labels.float().cpu())

    def auc(self) -> float | None:
        """Area under the ROC curve; None if only one class was seen."""
        from sklearn.metrics import roc_auc_score

        if not self._labels:
            return None
        labels = torch.cat(self._labels)
        if labels.min() == labels.max():
            return None
        return float(roc_auc_score(labels.numpy(), torch.cat(self._scores).numpy()))

    def normalised_entropy(self) -> float | None:
        """Log loss divided by the entropy of the mean label (He et al. 2014); None if only one class was seen."""
        if not self._labels:
            return None
        labels = torch.cat(self._labels).double()
        rate = float(labels.mean())
        if rate in (0.0, 1.0):
            return None
        # Clipped as float32 rounds a confident sigmoid to 0 or 1, whose logarithm would be infinite.
        scores = torch.cat(self._scores).double().clamp(1e-7, 1 - 1e-7)
        log_loss = -float((labels * scores.log() + (1 - labels) * (1 - scores).log()).mean())
        return log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
