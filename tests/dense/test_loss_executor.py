"""Models that compute their own loss: gradients are those of a plain backward, weighted over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.dense.loss_executor import LossExecutor, LossInputs, call_model
from bagpipe.dense.loss_scale import LossScale
from bagpipe.errors import InputError


class _Model(nn.Module):
    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, -1.0], dtype=torch.float64))
        self.result = result

    def forward(self, batch: torch.Tensor) -> Any:
        if self.result is not None:
            return self.result
        loss = (batch * self.weight).square().mean()
        return loss, batch + 1


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("scale", [1, 8])
def test_gradients_are_those_of_the_users_backward(share: int, scale: int) -> None:
    batch = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    plain, ours = _Model(), _Model()
    plain(batch)[0].backward()
    executor = LossExecutor(ours)
    step = executor.forward(LossInputs(batch=batch, num_examples=3), 3 * share, LossScale(value=scale))
    step.backward()
    assert torch.equal(ours.weight.grad, plain.weight.grad * scale / share)
    assert executor.loss is not None
    assert not executor.loss.requires_grad
    assert torch.equal(executor.outputs, batch + 1)
    assert float(step.loss_sum) == pytest.approx(3 * float(executor.loss), abs=1e-12)


def test_a_vector_of_losses_is_summed() -> None:
    loss, outputs = call_model(_Model((torch.tensor([1.0, 2.0, 4.0]), "kept")), None)
    assert (float(loss), outputs) == (7.0, "kept")


def test_no_examples_beside_those_of_others_count_for_nothing() -> None:
    executor = LossExecutor(_Model())
    executor.forward(LossInputs(batch=torch.ones(3, 2, dtype=torch.float64), num_examples=3), 3, LossScale())
    before = executor.loss
    nothing = LossInputs(batch=None, num_examples=0)
    assert executor.forward(nothing, 3, LossScale()) is None
    assert executor.outputs is None
    assert executor.loss is before


def test_a_global_batch_without_examples_is_computed() -> None:
    executor = LossExecutor(model := _Model((torch.zeros(0, requires_grad=True), "kept")))
    step = executor.forward(LossInputs(batch=None, num_examples=0), 0, LossScale())
    assert step is not None
    step.backward()
    assert (float(step.loss_sum), executor.outputs) == (0.0, "kept")
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.zeros(()), r"must return \(loss, outputs\), got a tensor of shape \[\]"),
        ((torch.zeros(2, 2), None), r"scalar or vector of losses, got a tensor of shape \[2, 2\]"),
        ((1.0, None), "scalar or vector of losses, got float"),
        ((1, 2, 3), "got a tuple of 3 values"),
    ],
)
def test_other_results_are_refused(result: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        call_model(_Model(result), None)
