"""`ESMM` against its formula."""

from __future__ import annotations

import pytest
import torch

from bagpipe.models.esmm import ESMM
from tests.models.comparison import Bags, assert_same_step
from tests.models.plain_tasks import PlainESMM
from tests.models.test_tasks import DIMS, task_batch


@pytest.mark.parametrize("weighted", [False, True])
def test_it_equals_the_formula(weighted: bool) -> None:
    batch = task_batch("click", "conversion", weighted=weighted)
    model, plain = ESMM(Bags(DIMS), num_dense=2, tower_mlp=(5, 4)), PlainESMM(Bags(DIMS), 2, (5, 4))
    assert_same_step(model, plain, lambda module: module(batch)[0] if module is model else module(batch))


def test_outputs_multiply() -> None:
    _, outputs = ESMM(Bags(DIMS), click="seen", conversion="bought").double()(task_batch("seen", "bought", num_dense=0))
    torch.testing.assert_close(outputs["ctcvr"], outputs["ctr"] * outputs["cvr"])


@pytest.mark.parametrize("logits", [(800.0, 800.0), (-800.0, 800.0), (-800.0, -800.0)])
def test_large_logits_have_finite_losses(logits: tuple[float, float]) -> None:
    """In float64 1 - sigmoid(800)^2 is 0."""
    model = ESMM(Bags(DIMS), tower_mlp=(2,)).double()
    for tower, logit in zip((model.ctr, model.cvr), logits, strict=True):
        for parameter in tower.parameters():
            parameter.data.zero_()
        tower[-1].bias.data.fill_(logit)
    loss, _ = model(task_batch("click", "conversion", num_dense=0))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(value.grad).all() for value in model.parameters())
