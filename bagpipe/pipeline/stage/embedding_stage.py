"""`EmbeddingStageRunner`: one lookup per batch for the dense stages of a process, and one backward.

    X_EMBED    inputs ──embedding module──> values of all examples ──slices──> stages (labels to those with a loss)
    X_EMBED_GRAD  gradients of the micro-batches ──> one per value, of all examples ──> one backward into the rows

A row's gradient is thus summed once per batch and in the plan's order, whatever the micro-batches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bagpipe.errors import JobError
from bagpipe.pipeline.stage.batches import Batches
from bagpipe.pipeline.stage.channel import Channel, owned
from bagpipe.schedule.ir.step_program import EmbeddingStage

__all__ = ["EmbeddingStageRunner"]


class EmbeddingStageRunner:
    """One embedding stage. Its actions come from one thread.

    Args:
        embedding: which.
        module: ``module(dense, sparse)`` gives the values.
        numbers: of the values, in the module's order.
        labels: the number of the labels.
        outputs, taken: pipe -> channels to the stages, and those on which gradients come back; ascending stages.
        batches: of the process.
    """

    def __init__(
        self,
        *,
        embedding: EmbeddingStage,
        module: nn.Module,
        numbers: tuple[int, ...],
        labels: int,
        outputs: Mapping[int, Sequence[Channel]],
        taken: Mapping[int, Sequence[Channel]],
        batches: Batches,
    ) -> None:
        self._embedding_stage = embedding
        self._module = module
        self._numbers = numbers
        self._labels = labels
        self._outputs = outputs
        self._taken = taken
        self._batches = batches
        self._graded = sorted({n for channels in taken.values() for channel in channels for n in channel.numbers})
        self._graphs: dict[int, dict[int, Tensor]] = {}

    def pool(self, batch: int) -> None:
        """Look up the batch's examples and give the stages what they take of them.

        Raises:
            JobError: the batch has not the examples of the embedding stage's pipes.
        """
        given, shares = self._batches.get(batch)
        counts = {pipe: shares.pipes[pipe + 1] - shares.pipes[pipe] for pipe in self._embedding_stage.pipes}
        inputs = given.inputs
        num_read = 0 if inputs is None else inputs.labels.shape[0]
        if num_read != sum(counts.values()):
            raise JobError(
                f"batch {batch}: expected {sum(counts.values())} examples of the replica's {given.num_examples} at "
                f"process {self._embedding_stage.process}, got {num_read}"
            )
        if inputs is None or not num_read:
            return
        values = dict(zip(self._numbers, self._module(inputs.dense, inputs.sparse), strict=True))
        self._graphs[batch] = {n: values[n] for n in self._graded if values[n].requires_grad}
        values[self._labels] = inputs.labels
        first = 0
        for pipe, count in counts.items():
            for channel in self._outputs[pipe] if count else ():
                tensors = [values[n].detach()[first : first + count] for n in channel.numbers]
                flow = shares.flows[channel.number]
                for unit, (start, end) in enumerate(pairwise(flow.starts)):
                    if start < end:
                        parts = [tensor[start:end] for tensor in tensors]
                        if channel.link is not None:
                            parts = [owned(part) for part in parts]
                        channel.put(batch * channel.units + unit, parts, flow.users[unit])
            first += count

    def unpool(self, batch: int) -> None:
        """Give the rows the gradients of all micro-batches, and wait until what was sent in the batch has left."""
        graph = self._graphs.pop(batch, None)
        if graph is not None:
            gradients = self._gradients(batch)
            if graph:
                torch.autograd.backward(list(graph.values()), [gradients[n] for n in graph])

    def _gradients(self, batch: int) -> dict[int, Tensor]:
        """Value -> gradient ``[num_examples, …]``: those of its consumers in their order, pipe after pipe."""
        shares = self._batches.get(batch)[1]
        parts: dict[int, list[Tensor]] = {number: [] for number in self._graded}
        for pipe in self._embedding_stage.pipes:
            if shares.pipes[pipe] == shares.pipes[pipe + 1]:
                continue
            sums: dict[int, Tensor] = {}
            for channel in self._taken[pipe]:
                made = shares.flows[channel.number].made[0]
                for number, gradient in zip(channel.numbers, channel.take(batch * channel.units, made), strict=True):
                    sums[number] = sums[number] + gradient if number in sums else gradient
            for number, gradient in sums.items():
                parts[number].append(gradient)
        return {n: found[0] if len(found) == 1 else torch.cat(found) for n, found in parts.items()}
