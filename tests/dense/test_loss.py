"""Losses equal their formulas. In whole jobs: `tests/system/test_optim_settings.py`."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.nn import functional

from bagpipe.config.model_section import LossName
from bagpipe.dense.loss import BCE, LOSSES, Loss, summed_loss, total_loss

LOGITS = torch.linspace(-4, 4, 9, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 0, 0, 1, 1, 0, 1, 0.25], dtype=torch.float64)


def test_the_names_are_those_of_the_configuration() -> None:
    assert tuple(LOSSES) == get_args(LossName)


def plain(loss: Loss) -> float:
    """The loss in logarithms of probabilities."""
    y = LABELS * (1 - loss.label_smoothing) + 0.5 * loss.label_smoothing
    p = 1 / (1 + torch.exp(-LOGITS))
    positive, negative = -y * torch.log(p), -(1 - y) * torch.log(1 - p)
    if loss.name == "weighted_bce":
        positive = loss.pos_weight * positive
    each = positive + negative
    if loss.name == "focal":
        q = torch.where(y == 1, p, torch.where(y == 0, 1 - p, y * p + (1 - y) * (1 - p)))
        each = (
            each * torch.pow(1 - q, loss.gamma) * ((loss.alpha * y + (1 - loss.alpha) * (1 - y)) if loss.alpha else 1)
        )
    return float(each.sum())


@pytest.mark.parametrize(
    "loss",
    [
        BCE,
        Loss(label_smoothing=0.2),
        Loss(name="weighted_bce", pos_weight=3.0),
        Loss(name="weighted_bce", pos_weight=0.5, label_smoothing=0.1),
        Loss(name="focal"),
        Loss(name="focal", gamma=1.5, alpha=0.0),
        Loss(name="focal", gamma=0.0, alpha=0.6, label_smoothing=0.1),
    ],
)
def test_losses_are_their_formulas(loss: Loss) -> None:
    assert float(loss.summed(LOGITS, LABELS)) == pytest.approx(plain(loss), rel=1e-12)
    assert torch.equal(
        loss.total((LOGITS, -LOGITS), LABELS), loss.summed(LOGITS, LABELS) + loss.summed(-LOGITS, LABELS)
    )
    assert loss.summed(LOGITS.bfloat16(), LABELS.float()).dtype == torch.float32


def test_bce_is_torchs_bit_for_bit() -> None:
    theirs = functional.binary_cross_entropy_with_logits(LOGITS, LABELS, reduction="sum")
    assert torch.equal(summed_loss(LOGITS, LABELS), theirs)
    assert torch.equal(total_loss((LOGITS,), LABELS), theirs)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_sure_scores_are_numbers(name: str, gamma: float) -> None:
    logits = torch.tensor([-1e4, 1e4, -200.0, 200.0], requires_grad=True)
    Loss(name=name, gamma=gamma).summed(logits, torch.tensor([0.0, 1.0, 1.0, 0.0])).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
