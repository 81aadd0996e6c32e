"""`CudaGraphExecutor`: captures forward, loss and backward of the dense stage once, and replays them.

    embedding(inputs) ──values──copy──> leaves ──┐                        ┌─> loss, loss sum
                     labels ──copy──> labels ─┼─ replay: stage, loss, ─┼─> gradients of parameters ──> `grad`
                 loss scale ──fill──> root ───┘          gradients     └─> gradients of leaves ──> embedding's backward

The lookups stay outside the capture, with the row kernels. Every full batch is replayed; the last, smaller one runs
operator by operator. So whether a batch is replayed depends on its size alone. Gradients come from `autograd.grad`,
which accumulates nothing and calls no hooks, so the capture has no side effects. Sums over ranks start at the reduce,
not during the backward.

Outputs of a replay are valid until the next replay. With several ranks, row gradients travel while the next batch is
computed, so they are copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bagpipe.dense.executor import DensePass, heads_of, split_pass, values_of
from bagpipe.dense.graphs import Graphs, Recording
from bagpipe.dense.loss import BCE, Loss
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import Precision
from bagpipe.errors import InputError
from bagpipe.split.staged_model import StagedModel

if TYPE_CHECKING:
    from bagpipe.types.model_inputs import ModelInputs

__all__ = ["CudaGraphExecutor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recorded:
    """The capture for one number of examples.

    Attributes:
        values: what the stage takes, static; leaves where a gradient is wanted.
        labels: static.
        root: what the backward starts from, static.
        recording: its outputs are loss, loss sum, then the gradients.
        parameters: those that have a gradient, in the order of theirs.
        graded: positions of the values that have a gradient, in the order of theirs.
    """

    values: tuple[Tensor, ...]
    labels: Tensor
    root: Tensor
    recording: Recording
    parameters: tuple[nn.Parameter, ...]
    graded: tuple[int, ...]

    def load(self, values: Sequence[Tensor], labels: Tensor, loss_scale: LossScale) -> None:
        """Copy a batch and its scale into the static memory."""
        self.root.fill_(loss_scale.value)
        with torch.no_grad():
            for static, value in zip((*self.values, self.labels), (*values, labels), strict=True):
                static.copy_(value)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RecordedPass:
    """A batch whose replay is enqueued, gradients included."""

    recorded: _Recorded
    values: Sequence[Tensor]
    copies: bool

    @property
    def loss(self) -> Tensor:
        return self.recorded.recording.outputs[0]

    @property
    def loss_sum(self) -> Tensor:
        return self.recorded.recording.outputs[1]

    def backward(self) -> None:
        recorded = self.recorded
        gradients = recorded.recording.outputs[2:]
        of_parameters, of_values = gradients[: len(recorded.parameters)], gradients[len(recorded.parameters) :]
        for parameter, gradient in zip(recorded.parameters, of_parameters, strict=True):
            parameter.grad = gradient
        given = [gradient.clone() if self.copies else gradient for gradient in of_values]
        if given:
            torch.autograd.backward([self.values[position] for position in recorded.graded], given)


class CudaGraphExecutor:
    """See above.

    Args:
        staged: the model as an embedding stage and one stage, whose forward draws no random numbers.
        precision: what it computes in.
        graphs: of the model's device.
        full_batch: examples of a global batch that is not the last one.
        copies: gradients of values must outlive the next batch's forward.
        loss: of the logits.

    Raises:
        InputError: the model draws random numbers.
    """

    def __init__(
        self,
        staged: StagedModel,
        precision: Precision,
        graphs: Graphs,
        *,
        full_batch: int,
        copies: bool,
        loss: Loss = BCE,
    ) -> None:
        if staged.stages[0].uses_random:
            raise InputError("run.cuda_graph is not possible for a model that draws random numbers (dropout)")
        self.precision = precision
        self._staged = staged
        self._graphs = graphs
        self._full_batch = full_batch
        self._copies = copies
        self._loss = loss
        self._parameters = [p for p in staged.stages[0].module.parameters() if p.requires_grad]
        # By the number of this rank's examples, which a full batch gives one or two values.
        self._recorded: dict[int, _Recorded] = {}

    def forward(self, inputs: ModelInputs, num_global_examples: int, loss_scale: LossScale) -> DensePass:
        values = values_of(self._staged, inputs)
        if num_global_examples != self._full_batch:
            return split_pass(self._staged, values, inputs.labels, num_global_examples, loss_scale, self._loss)
        num_examples = inputs.labels.shape[0]
        recorded = self._recorded.get(num_examples)
        if recorded is None:
            recorded = self._recorded[num_examples] = self._record(values, inputs.labels)
        recorded.load(values, inputs.labels, loss_scale)
        recorded.recording.replay()
        return _RecordedPass(recorded=recorded, values=values, copies=self._copies)

    def _record(self, values: Sequence[Tensor], labels: Tensor) -> _Recorded:
        leaves = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
        static_labels = labels.clone()
        root = labels.new_ones(())  # a loss has its labels' dtype
        graded = [position for position, leaf in enumerate(leaves) if leaf.requires_grad]
        wanted = [*self._parameters, *(leaves[position] for position in graded)]
        reached: list[bool] = []

        def work() -> list[Tensor]:
            total = self._loss.total(heads_of(self._staged, leaves), static_labels)
            loss = total / self._full_batch
            gradients = torch.autograd.grad(loss, wanted, root, allow_unused=True)
            reached[:] = [gradient is not None for gradient in gradients]
            pairs = zip(wanted, gradients, strict=True)
            found = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
            return [loss.detach(), total.detach(), *_apart(found)]

        # Capturing runs the work several times; its effects on buffers (running means) must not count.
        buffers = {buffer: buffer.clone() for buffer in self._staged.stages[0].module.buffers()}
        recording = self._graphs.record(work)
        for buffer, before in buffers.items():
            buffer.copy_(before)
        of_parameters, of_values = reached[: len(self._parameters)], reached[len(self._parameters) :]
        return _Recorded(
            values=tuple(leaves),
            labels=static_labels,
            root=root,
            recording=recording,
            parameters=tuple(compress(self._parameters, of_parameters)),
            graded=tuple(compress(graded, of_values)),
        )


def _apart(found: Iterable[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradients as autograd accumulates them: each in its own memory, with the strides of its tensor.

    Two tensors that are added share one gradient; an in-place change would change both.
    """
    taken: set[int] = set()
    gradients = []
    for tensor, gradient in found:
        memory = gradient.untyped_storage().data_ptr()
        if memory in taken or gradient.stride() != tensor.stride():
            gradient = torch.empty_like(tensor).copy_(gradient)
        taken.add(memory)
        gradients.append(gradient)
    return gradients
