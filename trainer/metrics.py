"""Quality of held-out predictions: AUC and normalised entropy, both of the logits.

every rank: add(logits, labels) per batch ──gathered──> rank 0: all examples ──> auc, normalised_entropy
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["BinaryMetrics"]


class BinaryMetrics:
    """Collects logits and labels on the host, 12 or 16 B per example. Both metrics need the scores of all examples."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Add the logits and labels ``[n]`` of one batch."""
        # Tensors from a device are in staging memory, which later batches reuse.
        self._logits.append(logits.detach().to("cpu", copy=True))
        self._labels.append(labels.detach().to("cpu", copy=True))

    def gathered(self, collect: Callable[[Tensor], Tensor]) -> BinaryMetrics:
        """Metrics over the examples of all ranks. `collect` concatenates the ranks' 1-D tensors (`Ranks.collect`)."""
        together = BinaryMetrics()
        empty = torch.empty(0)
        logits, labels = torch.cat([empty, *self._logits]).double(), torch.cat([empty, *self._labels]).double()
        together.add(collect(logits), collect(labels))
        return together

    def auc(self) -> float | None:
        """Area under the ROC curve. None if there is only one class or a logit is not finite.

        Computed from logits: a sigmoid keeps their order but rounds confident ones to the same score.
        """
        from sklearn.metrics import roc_auc_score

        scored = self._scored()
        return None if scored is None else float(roc_auc_score(scored[1].numpy(), scored[0].numpy()))

    def normalised_entropy(self) -> float | None:
        """Log loss divided by the entropy of the mean label (He et al. 2014, "Practical Lessons from Predicting Clicks
        on Ads at Facebook"). None if there is only one class or a logit is not finite.
        """
        scored = self._scored()
        if scored is None:
            return None
        logits, labels = scored
        log_loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
        rate = float(labels.mean())
        return log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))

    def _scored(self) -> tuple[Tensor, Tensor] | None:
        """All logits and labels ``[n]``, float64. None if the metrics are undefined."""
        if not self._labels:
            return None
        logits, labels = torch.cat(self._logits).double(), torch.cat(self._labels).double()
        if not len(labels) or labels.min() == labels.max() or not bool(logits.isfinite().all()):
            return None
        return logits, labels
