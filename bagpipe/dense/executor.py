"""`DenseExecutor`: forward and loss of a batch, then its backward, by one of several ways with one result.

    forward(inputs) ──> DensePass: loss, loss_sum ──backward()──> gradients: parameters' in `grad`, rows' in groups

Gradients are multiplied by the batch's loss scale (`LossScale`); who takes them divides it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from bagpipe.dense.loss import as_heads, total_loss
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.split.staged_model import StagedModel

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = [
    "DenseExecutor",
    "DensePass",
    "EagerExecutor",
    "EagerPass",
    "SplitExecutor",
    "heads_of",
    "split_pass",
    "values_of",
]


class DensePass(Protocol):
    """A batch between its forward and its backward.

    Attributes:
        loss: scalar, the mean over the global batch, of which these examples are a part.
        loss_sum: scalar without history, the sum over the examples.
    """

    @property
    def loss(self) -> Tensor: ...

    @property
    def loss_sum(self) -> Tensor: ...

    def backward(self) -> None:
        """Deliver the gradients. At most once."""
        ...


class DenseExecutor(Protocol):
    """Trains the dense part of one model. All calls come from one thread at a time.

    Attributes:
        precision: what it computes in.
    """

    @property
    def precision(self) -> Precision: ...

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        """Forward and loss of a batch whose rows are current.

        Args:
            inputs: of this rank's examples, at least one.
            num_global_examples: of all ranks.
            loss_scale: what gradients are to be multiplied by.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EagerPass:
    """A pass that autograd remembers."""

    loss: Tensor
    loss_sum: Tensor
    loss_scale: LossScale

    def backward(self) -> None:
        torch.autograd.backward(self.loss, self.loss_scale.root_gradient(self.loss))


def eager_pass(heads: tuple[Tensor, ...], labels: Tensor, num_global_examples: int, loss_scale: LossScale) -> EagerPass:
    """Logits ``[num_examples]`` of every head, and labels, as a pass."""
    total = total_loss(heads, labels)
    return EagerPass(loss=total / num_global_examples, loss_sum=total.detach(), loss_scale=loss_scale)


class EagerExecutor:
    """The model as it is, operator by operator.

    Args:
        model: called as ``model(dense, sparse)``; gives logits or a tuple of them.
        precision: what it computes in.
    """

    def __init__(self, model: nn.Module, precision: Precision | None = None) -> None:
        self.precision = precision if precision is not None else Precision()
        self._model = model

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        with self.precision.autocast():
            logits = self._model(inputs.dense, inputs.sparse)
        return eager_pass(as_heads(logits), inputs.labels, num_global_examples, loss_scale)


class SplitExecutor:
    """The lookups apart from a dense stage that takes and gives tensors only, and so may be a compiled one.

    Args:
        staged: the model as an embedding stage and one stage.
        precision: what it computes in.
    """

    def __init__(self, staged: StagedModel, precision: Precision) -> None:
        self.precision = precision
        self._staged = staged

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        return split_pass(self._staged, values_of(self._staged, inputs), inputs.labels, num_global_examples, loss_scale)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitPass:
    """A pass in two pieces: the stage's begins at leaves, which stand for the embedding stage's values."""

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
        pairs = [(value, leaf.grad) for value, leaf in zip(self.values, self.leaves, strict=True)]
        reached = [(value, gradient) for value, gradient in pairs if gradient is not None]
        if reached:
            torch.autograd.backward([value for value, _ in reached], [gradient for _, gradient in reached])


def split_pass(
    staged: StagedModel, values: Sequence[Tensor], labels: Tensor, num_global_examples: int, loss_scale: LossScale
) -> SplitPass:
    """What the embedding stage gave, and labels, as a pass."""
    leaves = _leaves_of(values)
    stage = eager_pass(heads_of(staged, leaves), labels, num_global_examples, loss_scale)
    return SplitPass(stage=stage, values=values, leaves=leaves)


def _leaves_of(values: Sequence[Tensor]) -> Sequence[Tensor]:
    """The values without their history, wanting gradients where they did."""
    return [value.detach().requires_grad_(value.requires_grad) for value in values]


def values_of(staged: StagedModel, inputs: ModelInputs) -> Sequence[Tensor]:
    """What the only stage takes, differentiable towards the rows."""
    values = dict(zip(staged.embedding_values, staged.embedding(inputs.dense, inputs.sparse), strict=True))
    return [values[number] for number in staged.stages[0].inputs]


def heads_of(staged: StagedModel, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Logits ``[num_examples]`` of every head from what the only stage takes."""
    stage = staged.stages[0]
    outputs = dict(zip(stage.outputs, stage.module(*values), strict=True))
    return as_heads([outputs[number] for _, number in sorted(stage.heads)])
