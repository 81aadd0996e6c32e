"""Quality of held-out predictions: AUC and normalised entropy, both of the logits.

    every rank: add(logits, labels) per batch ──gathered──> rank 0: all examples ──quality──> values and reasons

Rule of this file: *a metric never ends a finished job*. One without a value is left out, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["METRIC_NAMES", "BinaryMetrics", "Quality", "UndefinedMetric"]

#: Names for people, by field of `Quality`.
METRIC_NAMES: Mapping[str, str] = {"auc": "AUC", "ne": "NE"}


class UndefinedMetric(ValueError):
    """A metric is not defined for these examples; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Metrics of some examples; None where a metric was not computed.

    Attributes:
        auc: area under the ROC curve.
        ne: normalised entropy.
        left_out: why a metric has no value, by its field; empty if none was asked for.
    """

    auc: float | None = None
    ne: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


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

    def quality(self) -> Quality:
        """All metrics. Raises nothing: a metric that cannot be computed is left out with the reason."""
        values: dict[str, float] = {}
        left_out: dict[str, str] = {}
        for name, compute in (("auc", self.auc), ("ne", self.normalised_entropy)):
            try:
                values[name] = compute()
            except UndefinedMetric as error:
                left_out[name] = str(error)
            except Exception as error:  # such as no scikit-learn, or no memory
                left_out[name] = f"it failed with {type(error).__name__}: {' '.join(str(error).split())}"
        return Quality(**values, left_out=left_out)

    def auc(self) -> float:
        """Area under the ROC curve. Computed from logits: a sigmoid keeps their order but rounds confident ones to the
        same score.

        Raises:
            UndefinedMetric: no examples, a logit is not finite, only one class, or a label that is no class (soft
                labels).
        """
        from sklearn.metrics import roc_auc_score

        logits, labels = self._scored()
        num_soft = int(((labels != 0) & (labels != 1)).sum())
        if num_soft:
            raise UndefinedMetric(
                f"it needs labels 0 and 1, and {num_soft} of {len(labels)} held-out labels are neither"
            )
        _check_both_classes(labels)
        return float(roc_auc_score(labels.numpy(), logits.numpy()))

    def normalised_entropy(self) -> float:
        """Log loss divided by the entropy of the mean label (He et al. 2014, "Practical Lessons from Predicting Clicks
        on Ads at Facebook"). Defined for soft labels too.

        Raises:
            UndefinedMetric: no examples, a logit is not finite, or only one class.
        """
        logits, labels = self._scored()
        _check_both_classes(labels)
        log_loss = float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
        rate = float(labels.mean())
        return log_loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))

    def _scored(self) -> tuple[Tensor, Tensor]:
        """All logits and labels ``[n]``, float64.

        Raises:
            UndefinedMetric: there are none, or a logit is not finite.
        """
        logits = torch.cat([torch.empty(0), *self._logits]).double()
        labels = torch.cat([torch.empty(0), *self._labels]).double()
        if not len(labels):
            raise UndefinedMetric("there are no held-out examples")
        num_bad = int((~logits.isfinite()).sum())
        if num_bad:
            raise UndefinedMetric(f"{num_bad} of {len(logits)} held-out scores are not finite")
        return logits, labels


def _check_both_classes(labels: Tensor) -> None:
    """Raises UndefinedMetric if all labels ``[n]`` are 0, or all are 1."""
    if labels.min() == labels.max() and float(labels[0]) in (0.0, 1.0):
        raise UndefinedMetric(f"it needs two classes, and all {len(labels)} held-out labels are {labels[0]:g}")
