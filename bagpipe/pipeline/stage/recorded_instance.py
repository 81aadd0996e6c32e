"""`InstanceRecordings`: forwards of a stage instance by recordings, with their losses.

    leaves by value number, weights of a version ──> RecordedMicroBatch ──copies──> outputs that are sent, loss sum

Neighbours take an output in lanes of their own, and messages are sent from it. So it is a copy: static memory belongs
to the instance's lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bagpipe.dense.versioned_call import in_place_of
from bagpipe.pipeline.stage.recorded_stage import GraphCapture, RecordedMicroBatch, StageRecordings
from bagpipe.pipeline.stage.stage_versions import StageVersions
from bagpipe.split.staged_model import StageModule

__all__ = ["InstanceRecordings", "LossSum", "summed_loss"]

#: (head, logits, labels) -> sum of the losses over examples.
LossSum = Callable[[int, Tensor, Tensor], Tensor]


class InstanceRecordings:
    """Recordings of a stage instance. Its lane alone calls them.

    Args:
        capture: how stages are recorded.
        stage: the stage.
        module: its module, or a copy with its own gradients.
        sent: numbers of the values that other stages take.
        graded: numbers of those that get a gradient.
        labels: value number of the labels.
        loss: loss of a head.
        splits: the schedule has I and W of the stage.
        versions: weights of an asynchronous schedule, which are copied into static memory; None: a recording reads the
            parameters.
        parameters: trainable parameters of the module, in the order of `versions`.

    Attributes:
        full_batch: see `GraphCapture`.
    """

    def __init__(
        self,
        capture: GraphCapture,
        stage: StageModule,
        module: nn.Module,
        *,
        sent: Sequence[int],
        graded: Sequence[int],
        labels: int,
        loss: LossSum,
        splits: bool = False,
        versions: StageVersions | None = None,
        parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        self.full_batch = capture.full_batch
        self._recordings = StageRecordings(capture, self._compute, module=module, splits=splits)
        self._stage = stage
        self._module = module
        self._sent = sent
        self._graded = graded
        self._labels = labels
        self._loss = loss
        self._versions = versions
        self._parameters = () if versions is None else tuple(parameters)
        self._numbers: tuple[int, ...] = ()

    def forward(
        self, leaves: Mapping[int, Tensor], batch: int, scale: float, *, trains: bool = True, keeps: bool = True
    ) -> tuple[RecordedMicroBatch | None, dict[int, Tensor], Tensor | None]:
        """F of a micro-batch.

        Args:
            leaves: its inputs by value number, always of the same values in the same order.
            batch: its batch.
            scale: of the loss.
            trains: the micro-batch has a backward.
            keeps: its activations stay for that.

        Returns:
            What makes the backward, None without `keeps`; the outputs that are sent, by value number; the loss sum, if
            there are heads.
        """
        self._numbers = tuple(leaves)
        recorded = self._begin(leaves, batch, scale, (), trains=trains)
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in recorded.shown]
        if not keeps:
            recorded.end()
        outputs = dict(zip(self._sent, copies, strict=False))
        return recorded if keeps else None, outputs, copies[-1] if self._stage.heads else None

    def again(
        self, leaves: Mapping[int, Tensor], batch: int, scale: float, buffers: Mapping[str, Tensor]
    ) -> RecordedMicroBatch:
        """REC of a micro-batch.

        Args:
            leaves, batch, scale: as of its F.
            buffers: the module's, as the F began with them; copies, which it changes in their place.
        """
        return self._begin(leaves, batch, scale, [*buffers.values()])

    def _begin(
        self, leaves: Mapping[int, Tensor], batch: int, scale: float, buffers: Sequence[Tensor], *, trains: bool = True
    ) -> RecordedMicroBatch:
        if self._versions is None:
            return self._recordings.forward([*leaves.values(), *buffers], scale, trains=trains)
        forward, backward = self._versions.weights("forward", batch), self._versions.weights("backward", batch)
        weights = [each.detach() for each in (self._parameters if forward is None else forward)]
        recorded = self._recordings.forward([*leaves.values(), *weights, *buffers], scale, trains=trains)
        if backward is not forward:
            recorded.late = len(leaves), self._parameters if backward is None else backward
        return recorded

    def _compute(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """See `StageRecordings`. Inputs beyond the leaves are weights, then buffers."""
        leaves, others = dict(zip(self._numbers, inputs, strict=False)), inputs[len(self._numbers) :]
        names = {id(parameter): name for name, parameter in self._module.named_parameters()}
        given = {
            names[id(parameter)]: in_place_of(parameter, stored)
            for parameter, stored in zip(self._parameters, others, strict=False)
        }
        buffers = (name for name, _ in self._module.named_buffers())
        given |= dict(zip(buffers, others[len(self._parameters) :], strict=False))
        arguments = tuple(leaves[number] for number in self._stage.inputs)
        results = functional_call(self._module, given, arguments) if given else self._module(*arguments)
        outputs = dict(zip(self._stage.outputs, results, strict=True))
        total = summed_loss(self._stage, outputs, leaves.get(self._labels), self._loss)
        shown, roots = [outputs[number] for number in self._sent], [outputs[number] for number in self._graded]
        return (shown, roots) if total is None else ([*shown, total], [*roots, total / self.full_batch])


def summed_loss(
    stage: StageModule, outputs: Mapping[int, Tensor], labels: Tensor | None, loss: LossSum
) -> Tensor | None:
    """The losses of a stage's heads added up in their order; None: it has none."""
    total: Tensor | None = None
    for head, number in stage.heads:
        assert labels is not None, "a stage with heads takes the labels"
        term = loss(head, outputs[number], labels)
        total = term if total is None else total + term
    return total
