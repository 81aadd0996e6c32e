"""`StagedModel`: a model cut into an embedding stage and dense stages that exchange tensors with one row per example.

    (dense, sparse) ──embedding──> values ──stage 0, 1, …──> values ──> outputs (logits) of the stages that have a loss

Invariant: the first dimension of every value counts the examples, so a micro-batch is a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bagpipe.schedule.analysis.cover import Cover, check_cover
from bagpipe.schedule.ir.stage_graph import StageGraph

__all__ = ["StageModule", "StageValue", "StagedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageValue:
    """One tensor that leaves a stage or the embedding stage.

    Attributes:
        name: as in the traced graph.
        producer: stage number; the number of stages for the embedding stage.
        consumers: stages that take it, ascending; empty for a model output without other users.
        shape: without the examples' dimension.
        dtype: of its elements.
        wants_grad: consumers give a gradient back.
    """

    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    wants_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageModule:
    """One dense stage.

    Attributes:
        name: for people.
        module: takes the inputs as positional arguments, returns a tuple with the outputs.
        inputs, outputs: numbers of values, in the order of arguments and results.
        heads: model outputs computed here: (position in the model's outputs, number of the value).
        uses_random: its forward draws random numbers (dropout).
    """

    name: str
    module: nn.Module
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ()
    uses_random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedModel:
    """A model in stages, which share parameters and submodules with `model`.

    Attributes:
        model: the whole model, called as ``model(dense, sparse)``.
        embedding: ``embedding(dense, sparse)`` returns the tuple of values whose producer is the embedding stage.
        stages: by number.
        values: by number.
    """

    model: nn.Module
    embedding: nn.Module
    stages: tuple[StageModule, ...]
    values: tuple[StageValue, ...]

    @property
    def embedding_values(self) -> tuple[int, ...]:
        """Numbers of the embedding stage's values."""
        return tuple(n for n, value in enumerate(self.values) if value.producer == len(self.stages))

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) among the stages, sorted, each once."""
        found = {(v.producer, c) for v in self.values for c in v.consumers if v.producer < len(self.stages)}
        return tuple(sorted(found))

    @property
    def embedding_edges(self) -> tuple[tuple[int, bool], ...]:
        """(stage, whether it gives a gradient back) of the stages that the embedding stage feeds, labels included."""
        fed = {c for n in self.embedding_values for c in self.values[n].consumers}
        graded = {c for n in self.embedding_values for c in self.values[n].consumers if self.values[n].wants_grad}
        with_loss = {number for number, stage in enumerate(self.stages) if stage.heads}
        return tuple((stage, stage in graded) for stage in sorted(fed | with_loss))

    def graph(self, microbatches: int | Sequence[int]) -> StageGraph:
        """The stage graph with `microbatches` micro-batches per stage, or of each stage.

        Raises:
            ScheduleError: the number is below 1, the stages feed each other in a cycle, a stage has no path to a loss,
                or it takes a value that its producer does not make.
        """
        graph = StageGraph(
            micro_per_batch=(
                (microbatches,) * len(self.stages) if isinstance(microbatches, int) else tuple(microbatches)
            ),
            edges=self.edges,
            names=tuple(stage.name for stage in self.stages),
        )
        taken: dict[tuple[int, int], frozenset[str]] = {}
        for consumer, stage in enumerate(self.stages):
            for value in (self.values[n] for n in stage.inputs if self.values[n].producer < len(self.stages)):
                edge = value.producer, consumer
                taken[edge] = taken.get(edge, frozenset()) | {value.name}
        check_cover(
            Cover(
                graph=graph,
                losses=frozenset(number for number, stage in enumerate(self.stages) if stage.heads),
                tensors=taken,
                outputs=tuple(frozenset(self.values[n].name for n in stage.outputs) for stage in self.stages),
            )
        )
        return graph

    def parameters_of(self, stage: int) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter) of the trainable parameters of a stage, in the model's order."""
        own = {id(parameter) for parameter in self.stages[stage].module.parameters()}
        return ((name, p) for name, p in self.model.named_parameters() if id(p) in own and p.requires_grad)
