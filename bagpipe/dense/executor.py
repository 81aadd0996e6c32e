"""`DenseExecutor`: computes forward, loss and backward of the dense part. All of them give the same result.

    forward(inputs) ──> DensePass: loss, loss_sum ──backward()──> gradients: parameters' in `grad`, rows' in groups

Gradients are multiplied by the batch's loss scale (`LossScale`); the caller divides it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bagpipe.dense.loss import BCE, Loss, as_heads
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.split.staged_model import StagedModel
from bagpipe.types.model_inputs import ModelInputs

__all__ = [
    "DenseExecutor",
    "DensePass",
    "EagerExecutor",
    "EagerPass",
    "SplitExecutor",
    "heads_of",
    "leaves_of",
    "pass_on",
    "split_pass",
    "values_of",
]


class DensePass(Protocol):
    """A batch between forward and backward.

    Attributes:
        loss: scalar: the losses of these examples, divided by the size of the global batch.
        loss_sum: scalar without autograd history: the sum over these examples.
    """

    @property
    def loss(self) -> Tensor: ...

    @property
    def loss_sum(self) -> Tensor: ...

    def backward(self) -> None:
        """Compute the gradients. At most once."""
        ...


class DenseExecutor(Protocol):
    """Computes the dense part of one model. Not thread-safe.

    Attributes:
        precision: dtypes of the computation.
    """

    @property
    def precision(self) -> Precision: ...

    def forward(self, inputs: Any, num_global_examples: int, loss_scale: LossScale) -> DensePass | None:
        """Compute forward and loss of a batch whose rows can be looked up. None: the inputs count for nothing.

        Args:
            inputs: this rank's examples: `ModelInputs` of at least one, or `LossInputs` of a `LossExecutor`.
            num_global_examples: examples of all ranks.
            loss_scale: factor of all gradients.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EagerPass:
    """A pass on autograd's own graph. Attributes: see `DensePass`."""

    loss: Tensor
    loss_sum: Tensor
    loss_scale: LossScale

    def backward(self) -> None:
        torch.autograd.backward(self.loss, self.loss_scale.root_gradient(self.loss))


def eager_pass(
    heads: tuple[Tensor, ...], labels: Tensor, num_global_examples: int, loss_scale: LossScale, loss: Loss = BCE
) -> EagerPass:
    """The pass of the heads' logits, each ``[num_examples]``."""
    total = loss.total(heads, labels)
    return EagerPass(loss=total / num_global_examples, loss_sum=total.detach(), loss_scale=loss_scale)


class EagerExecutor:
    """Runs the model operator by operator.

    Args:
        model: called as ``model(dense, sparse)``; gives logits or a tuple of them.
        precision: what it computes in.
        loss: of the logits.
    """

    def __init__(self, model: nn.Module, precision: Precision | None = None, loss: Loss = BCE) -> None:
        self.precision = precision if precision is not None else Precision()
        self._model = model
        self._loss = loss

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        with self.precision.autocast():
            logits = self._model(inputs.dense, inputs.sparse)
        return eager_pass(as_heads(logits), inputs.labels, num_global_examples, loss_scale, self._loss)


class SplitExecutor:
    """Runs lookups and dense stage separately. The stage takes and returns tensors only, so it can be compiled.

    Args:
        staged: the model as an embedding stage and one stage.
        precision: what it computes in.
        loss: of the logits.

    Attributes:
        staged: as given.
    """

    def __init__(self, staged: StagedModel, precision: Precision, loss: Loss = BCE) -> None:
        self.precision = precision
        self.staged = staged
        self._loss = loss

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        values = values_of(self.staged, inputs)
        return split_pass(self.staged, values, inputs.labels, num_global_examples, loss_scale, self._loss)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SplitPass:
    """A pass in two pieces. The stage's graph begins at leaves, one per value of the lookups."""

    stage: EagerPass
    values: Sequence[Tensor]
    leaves: Sequence[Tensor]

    @property
    def loss(self) -> Tensor:
        return self.stage.loss

    @property
    def loss_sum(self) -> Tensor:
        return self.stage.loss_sum

    def backward(self) -> None:
        self.stage.backward()
        pass_on(self.values, self.leaves)


def split_pass(
    staged: StagedModel,
    values: Sequence[Tensor],
    labels: Tensor,
    num_global_examples: int,
    loss_scale: LossScale,
    loss: Loss = BCE,
) -> _SplitPass:
    """The pass of the values that the lookups returned."""
    leaves = leaves_of(values)
    stage = eager_pass(heads_of(staged, leaves), labels, num_global_examples, loss_scale, loss)
    return _SplitPass(stage=stage, values=values, leaves=leaves)


def leaves_of(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The values detached, with the same `requires_grad`."""
    return [value.detach().requires_grad_(value.requires_grad) for value in values]


def pass_on(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Give the gradients of leaves to the values that they are of, and to the lookups behind these."""
    pairs = [(value, leaf.grad) for value, leaf in zip(values, leaves, strict=True)]
    reached = [(value, gradient) for value, gradient in pairs if gradient is not None]
    if reached:
        torch.autograd.backward([value for value, _ in reached], [gradient for _, gradient in reached])


def values_of(staged: StagedModel, inputs: ModelInputs) -> Sequence[Tensor]:
    """The inputs of the only stage, differentiable with respect to the rows."""
    values = dict(zip(staged.embedding_values, staged.embedding(inputs.dense, inputs.sparse), strict=True))
    return [values[number] for number in staged.stages[0].inputs]


def heads_of(staged: StagedModel, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Logits ``[num_examples]`` of every head, from the inputs of the only stage."""
    stage = staged.stages[0]
    outputs = dict(zip(stage.outputs, stage.module(*values), strict=True))
    return as_heads([outputs[number] for _, number in sorted(stage.heads)])
