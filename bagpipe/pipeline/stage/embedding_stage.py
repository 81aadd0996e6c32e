"""`EmbeddingStageRunner`: one embedding lookup and one backward per batch, for the dense stages.

    X_EMBED       inputs ──embedding module──> values of all examples ──slices──> stages (labels to those with a loss)
    X_EMBED_GRAD  gradients of the micro-batches ──> one per value, of all examples ──> one backward into the rows

A row's gradient is summed once per batch in the plan's order, so it does not depend on the number of micro-batches.
Where backwards are partial, what a stage gives is multiplied as its own gradient is, and zero for other examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.batches import Batches
from bagpipe.pipeline.stage.channel import Channel, owned, take_placed
from bagpipe.pipeline.stage.partial_backward import PartialBackward
from bagpipe.schedule.ir.step_program import EmbeddingStage

__all__ = ["EmbeddingStageRunner"]


class EmbeddingStageRunner:
    """Runs one embedding stage. One thread calls its actions.

    Args:
        embedding: the embedding stage.
        module: ``module(dense, sparse)`` returns the values.
        numbers: numbers of the values, in the module's order.
        labels: number of the labels.
        outputs: pipe -> channels of values to the stages, by ascending stage.
        output_grads: pipe -> channels of gradients from each stage, by ascending stage.
        batches: batches of the process.
        stages: of the instances, by their numbers; for partial backwards.
        partial_backward: which backwards are left out; None: none.
    """

    def __init__(
        self,
        *,
        embedding: EmbeddingStage,
        module: nn.Module,
        numbers: tuple[int, ...],
        labels: int,
        outputs: Mapping[int, Sequence[Channel]],
        output_grads: Mapping[int, Sequence[Sequence[Channel]]],
        batches: Batches,
        stages: Sequence[int] = (),
        partial_backward: PartialBackward | None = None,
    ) -> None:
        self._stage = embedding
        self._module = module
        self._numbers = numbers
        self._labels = labels
        self._outputs = outputs
        self._output_grads = output_grads
        self._batches = batches
        self._stages = stages
        self._partial_backward = partial_backward
        self._grad_values = sorted(
            {n for groups in output_grads.values() for channels in groups for n in channels[0].numbers}
        )
        self._graphs: dict[int, dict[int, Tensor]] = {}

    def embed(self, batch: int) -> None:
        """Look up the batch's examples and send the values to the stages.

        Raises:
            JobError: the batch has another number of examples than the embedding stage's pipes.
        """
        given, division = self._batches.get(batch)
        counts = {pipe: division.pipes[pipe + 1] - division.pipes[pipe] for pipe in self._stage.pipes}
        inputs = given.inputs
        num_read = 0 if inputs is None else inputs.labels.shape[0]
        if num_read != sum(counts.values()):
            raise JobError(
                f"batch {batch}: expected {sum(counts.values())} examples of the replica's {given.num_examples} at "
                f"process {self._stage.process}, got {num_read}"
            )
        if inputs is None or not num_read:
            return
        values = dict(zip(self._numbers, self._module(inputs.dense, inputs.sparse), strict=True))
        self._graphs[batch] = {n: values[n] for n in self._grad_values if values[n].requires_grad}
        values[self._labels] = inputs.labels
        first = 0
        for pipe, count in counts.items():
            for channel in self._outputs[pipe] if count else ():
                tensors = [values[n].detach()[first : first + count] for n in channel.numbers]
                for unit, (start, end) in enumerate(division.senders[channel.number]):
                    if start < end:
                        parts = [tensor[start:end] for tensor in tensors]
                        if channel.link is not None:
                            parts = [owned(part) for part in parts]
                        division.put(channel, batch * channel.units + unit, parts)
            first += count

    def embed_grad(self, batch: int) -> None:
        """Run one backward into the rows, from the gradients of all micro-batches; none if no micro-batch has any."""
        graph = self._graphs.pop(batch, None)
        if graph and self._has_gradients(batch):
            gradients = self._gradients(batch)
            torch.autograd.backward(list(graph.values()), [gradients[n] for n in graph])

    def _has_gradients(self, batch: int) -> bool:
        """Whether a stage that gives gradients computes a backward of a batch."""
        partial = self._partial_backward
        giving = ((pipe, channels[0]) for pipe, groups in self._output_grads.items() for channels in groups)
        return partial is None or any(
            partial.gives(self._stages[channel.sender], batch, partial.replica, (pipe,)) for pipe, channel in giving
        )

    def _gradients(self, batch: int) -> dict[int, Tensor]:
        """Value -> gradient ``[num_examples, …]``: summed over consumers in order, concatenated over pipes."""
        division = self._batches.get(batch)[1]
        parts: dict[int, list[Tensor]] = {number: [] for number in self._grad_values}
        for pipe in self._stage.pipes:
            if division.pipes[pipe] == division.pipes[pipe + 1]:
                continue
            sums: dict[int, Tensor] = {}
            for channels in self._output_grads[pipe]:
                for number, gradient in zip(channels[0].numbers, self._take(channels, batch), strict=True):
                    sums[number] = sums[number] + gradient if number in sums else gradient
            for number, gradient in sums.items():
                parts[number].append(gradient)
        return {n: found[0] if len(found) == 1 else torch.cat(found) for n, found in parts.items()}

    def _take(self, channels: Sequence[Channel], batch: int) -> list[Tensor]:
        """One gradient per value, of all examples of a pipe, from all instances of a stage."""
        given, division = self._batches.get(batch)
        partial, first = self._partial_backward, channels[0]
        if partial is None:
            return division.take(channels, batch, 0)
        stage, pipe = self._stages[first.sender], first.pipe
        sources = [
            (
                channel,
                batch * channel.units,
                [
                    part
                    for part in division.flows[channel.number].slices[0]
                    if partial.computes(stage, pipe, batch, part.unit)
                ],
            )
            for channel in channels
        ]
        taken = take_placed(sources, division.pipes[pipe + 1] - division.pipes[pipe])
        factor = partial.factor(stage, batch, given.num_global_examples)
        return taken if factor in (None, 1) else [gradient * factor for gradient in taken]
