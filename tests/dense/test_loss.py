"""Losses equal their formulas. In whole jobs: `tests/system/test_optim_settings.py`."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch.nn import functional

from bagpipe.config.model_section import LossName
from bagpipe.dense.loss import BCE, LOSSES, Loss

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
    assert torch.equal(BCE.summed(LOGITS, LABELS), theirs)
    assert torch.equal(BCE.total((LOGITS,), LABELS), theirs)


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_sure_scores_are_numbers(name: str, gamma: float) -> None:
    logits = torch.tensor([-1e4, 1e4, -200.0, 200.0], requires_grad=True)
    Loss(name=name, gamma=gamma).summed(logits, torch.tensor([0.0, 1.0, 1.0, 0.0])).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_is_a_number_of_equal_examples(name: str) -> None:
    loss = Loss(name=name, label_smoothing=0.1, pos_weight=2.0)
    weights = torch.tensor([2, 0, 1, 3, 1, 0, 2, 1, 4])
    found = loss.summed(LOGITS, LABELS, weights.double())
    repeated = loss.summed(LOGITS.repeat_interleave(weights), LABELS.repeat_interleave(weights))
    torch.testing.assert_close(found, repeated, rtol=1e-12, atol=0)


def test_each_head_has_its_label_and_its_weight() -> None:
    weights = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loss = Loss(num_labels=2, is_weighted=True, head_weights=(0.5, 2.0))
    assert loss.target_shape == (3,)
    targets = torch.stack([LABELS, 1 - LABELS, weights], dim=1)
    expected = 0.5 * BCE.summed(LOGITS, LABELS, weights) + 2 * BCE.summed(-LOGITS, 1 - LABELS, weights)
    torch.testing.assert_close(loss.total((LOGITS, -LOGITS), targets), expected, rtol=1e-12, atol=0)
    assert BCE.target_shape == ()
    alone = Loss(is_weighted=True)
    assert torch.equal(alone.total((LOGITS,), targets[:, [0, 2]]), BCE.summed(LOGITS, LABELS, weights))
