"""`LossExecutor`: a model that takes the user's batch and computes its own loss, as in torchrec's train pipelines.

    LossInputs: batch, its examples ──model(batch)──> (loss, outputs)      loss * n / N ──backward──> gradients

A rank's loss is weighted by its share n / N of the examples: if the loss is a mean over examples, gradients summed over
ranks are those of the mean over the global batch. Without examples beside those of others it counts for nothing, and
the model is not called. A global batch without examples is one like any other, whatever its loss is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.executor import DensePass, EagerPass
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.errors import InputError

__all__ = ["LossExecutor", "LossInputs", "call_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a model that computes its own loss.

    Attributes:
        batch: the user's batch, on the model's device.
        num_examples: its examples; can be 0.
    """

    batch: Any
    num_examples: int


class LossExecutor:
    """Runs the model as it is, operator by operator.

    Args:
        model: called as ``model(batch)``; returns ``(loss, outputs)``.
        precision: loss scale; autocast is the user's, in the model or around the step.

    Attributes:
        loss: loss of the latest batch, scalar without history.
        outputs: what the model returned beside it; None: it was not called.
    """

    def __init__(self, model: nn.Module, precision: Precision | None = None) -> None:
        self.precision = precision if precision is not None else Precision()
        self.loss: Tensor | None = None
        self.outputs: Any = None
        self._model = model

    def forward(self, inputs: LossInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass | None:
        """See `DenseExecutor`."""
        if not inputs.num_examples and num_global_examples:
            self.outputs = None
            return None
        loss, self.outputs = call_model(self._model, inputs.batch)
        self.loss = loss.detach()
        # Not a multiplication by 1: with one rank the gradients are those of the user's own backward.
        is_whole = inputs.num_examples == num_global_examples
        weighted = loss if is_whole else loss * (inputs.num_examples / num_global_examples)
        return EagerPass(loss=weighted, loss_sum=self.loss * inputs.num_examples, loss_scale=loss_scale)


def call_model(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """Loss, a scalar, and outputs of a model. A vector of losses is summed, as torchrec's train pipelines do.

    Raises:
        InputError: the model returned something else.
    """
    returned = model(batch)
    if not (isinstance(returned, (tuple, list)) and len(returned) == 2):
        raise InputError(f"the model's forward must return (loss, outputs), got {_describe(returned)}")
    loss, outputs = returned
    if not (isinstance(loss, Tensor) and loss.is_floating_point() and loss.dim() <= 1):
        raise InputError(f"the model's loss must be a floating-point scalar or vector of losses, got {_describe(loss)}")
    return (torch.sum(loss, dim=0) if loss.dim() else loss), outputs


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} values"
    return type(value).__name__
