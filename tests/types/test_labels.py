from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bagpipe.dense.loss import BCE
from bagpipe.types.labels import LOSS_LABELS, LabelRange


def test_both_ends_and_all_labels_between_are_in_the_range() -> None:
    labels = np.array([0, -0.0, 1e-30, 0.5, np.nextafter(np.float32(1), np.float32(0)), 1], np.float32)
    assert LabelRange(low=0, high=1).outside(labels).tolist() == []


def test_nan_is_outside_any_range() -> None:
    labels = np.array([math.nan, 5, -math.inf, math.inf], np.float32)
    assert LabelRange(low=-math.inf, high=math.inf).outside(labels).tolist() == [0]
    assert LabelRange(low=0, high=1).outside(labels).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("label", [0.0, 0.25, 1.0, -1e-3, 1.001, 7.5])
def test_the_loss_is_bounded_below_for_its_labels_alone(label: float) -> None:
    logits = torch.tensor([-1e6, 1e6], dtype=torch.float64)
    least = min(float(BCE.summed(logit[None], torch.tensor([label], dtype=torch.float64))) for logit in logits)
    outside = LOSS_LABELS.outside(np.array([label], np.float32))
    assert (least < 0) == bool(outside.size)
