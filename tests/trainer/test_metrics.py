from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics import BinaryMetrics


def test_metrics_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=300), (rng.random(300) < 0.2).astype(np.float64)
    metrics = BinaryMetrics()
    for part in np.array_split(np.arange(300), 7):
        metrics.add(torch.from_numpy(logits[part]), torch.from_numpy(labels[part]))
    scores = 1 / (1 + np.exp(-logits))
    rate = labels.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metrics.auc() == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert metrics.normalised_entropy() == pytest.approx(log_loss(labels, scores) / entropy, rel=1e-12)


@pytest.mark.parametrize("labels", [[0.0, 0.0], [1.0, 1.0], []])
def test_metrics_of_one_class_are_none(labels: list[float]) -> None:
    metrics = BinaryMetrics()
    metrics.add(torch.zeros(len(labels)), torch.tensor(labels))
    assert metrics.auc() is None
    assert metrics.normalised_entropy() is None
    assert BinaryMetrics().auc() is None


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_metrics_of_scores_that_are_not_finite_are_none(logit: float) -> None:
    metrics = BinaryMetrics()
    metrics.add(torch.tensor([0.0, 1.0, logit]), torch.tensor([0.0, 1.0, 1.0]))
    assert metrics.auc() is None
    assert metrics.normalised_entropy() is None


def test_confident_scores_keep_their_order() -> None:
    """A float32 sigmoid would round all of these scores to one."""
    metrics = BinaryMetrics()
    metrics.add(torch.tensor([30.0, 40.0, 50.0, 60.0]), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert metrics.auc() == 1.0
    assert math.isfinite(metrics.normalised_entropy() or math.nan)


def test_scores_are_copied() -> None:
    """The scores' memory is reused."""
    metrics, logits, labels = BinaryMetrics(), torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    metrics.add(logits, labels)
    logits.zero_()
    labels.zero_()
    assert metrics.auc() == 1.0
