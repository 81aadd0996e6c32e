from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from trainer.metrics import BinaryMetrics, Quality, UndefinedMetric


def metrics_of(logits: list[float], labels: list[float]) -> BinaryMetrics:
    metrics = BinaryMetrics()
    metrics.add(torch.tensor(logits), torch.tensor(labels))
    return metrics


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
    assert metrics.quality() == Quality(auc=metrics.auc(), ne=metrics.normalised_entropy())


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_metrics_of_one_class_are_left_out(label: float) -> None:
    reason = f"it needs two classes, and all 2 held-out labels are {label:g}"
    quality = metrics_of([0.5, -0.5], [label, label]).quality()
    assert quality == Quality(left_out={"auc": reason, "ne": reason})


def test_metrics_of_no_examples_are_left_out() -> None:
    for metrics in (BinaryMetrics(), metrics_of([], [])):
        reason = "there are no held-out examples"
        assert metrics.quality() == Quality(left_out={"auc": reason, "ne": reason})


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_metrics_of_scores_that_are_not_finite_are_left_out(logit: float) -> None:
    reason = "1 of 3 held-out scores are not finite"
    quality = metrics_of([0.0, 1.0, logit], [0.0, 1.0, 1.0]).quality()
    assert quality == Quality(left_out={"auc": reason, "ne": reason})


def test_soft_labels_have_an_entropy_but_no_area() -> None:
    logits, labels = [0.3, -1.0, 2.0, 0.0], [0.25, 0.0, 1.0, 0.5]
    quality = metrics_of(logits, labels).quality()
    assert quality.auc is None
    assert quality.left_out == {"auc": "it needs labels 0 and 1, and 2 of 4 held-out labels are neither"}
    losses = [math.log1p(math.exp(x)) - x * y for x, y in zip(logits, labels, strict=True)]
    rate = sum(labels) / 4
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert quality.ne == pytest.approx(sum(losses) / 4 / entropy, rel=1e-7)


def test_equal_soft_labels_have_an_entropy() -> None:
    """The log loss of the best constant score is the entropy of the mean label."""
    quality = metrics_of([0.0] * 3, [0.5] * 3).quality()
    assert quality.ne == pytest.approx(1.0, rel=1e-12)
    assert set(quality.left_out) == {"auc"}


def test_a_metric_that_fails_is_left_out_and_the_others_are_computed() -> None:
    class Broken(BinaryMetrics):
        def auc(self) -> float:
            raise RuntimeError("two\nlines")

    metrics = Broken()
    metrics.add(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    quality = metrics.quality()
    assert quality.left_out == {"auc": "it failed with RuntimeError: two lines"}
    assert quality.ne == metrics.normalised_entropy()


def test_confident_scores_keep_their_order() -> None:
    """A float32 sigmoid would round all of these scores to one."""
    metrics = metrics_of([30.0, 40.0, 50.0, 60.0], [0.0, 0.0, 1.0, 1.0])
    assert metrics.auc() == 1.0
    assert math.isfinite(metrics.normalised_entropy())


def test_scores_are_copied() -> None:
    """The scores' memory is reused."""
    metrics, logits, labels = BinaryMetrics(), torch.tensor([-1.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    metrics.add(logits, labels)
    logits.zero_()
    labels.zero_()
    assert metrics.auc() == 1.0


def test_an_undefined_metric_says_why() -> None:
    with pytest.raises(UndefinedMetric, match="it needs two classes"):
        metrics_of([0.0], [1.0]).auc()
