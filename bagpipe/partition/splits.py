"""`SplitModel`: ways to divide an operator over the devices of its stage, and what a stage divided so costs.

    split       takes     gives     each of n devices computes     collectives of its own                weights
    batch       batch     batch     its examples                   all-reduce of gradients, per batch    whole
    replicated  whole     whole     everything                     none                                  whole
    columns     whole     features  its features of the output     all-reduce of the input's gradient    1 / n
    rows        features  whole     with its input features        all-reduce of the output              1 / n

The last two are Megatron's for linear layers (Shoeybi et al., 2019, section 3): columns and then rows need one
all-reduce each way. Between operators a tensor changes its layout, and its gradient changes it back:

    from      to        of the tensor   of its gradient
    batch     whole     all-gather      -  (a device takes its part)
    whole     batch     -               all-gather
    features  whole     all-gather      -
    whole     features  -               all-gather
    batch <-> features  all-to-all      all-to-all

Tensors enter and leave a stage, and the model, divided by examples. A tensor that several operators take changes its
layout for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from bagpipe.cluster.network import Network
from bagpipe.partition.cost import CostModel, Placed
from bagpipe.partition.operators import Operator, members

__all__ = ["ALL_BATCH", "CHANGES", "SPLITS", "Split", "SplitModel", "Work", "bottleneck", "is_batch", "split_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A way to divide an operator: the layout of its inputs and that of its output."""

    takes: str
    gives: str


ALL_BATCH = "batch"

SPLITS: Mapping[str, Split] = {
    ALL_BATCH: Split(takes="batch", gives="batch"),
    "replicated": Split(takes="whole", gives="whole"),
    "columns": Split(takes="whole", gives="features"),
    "rows": Split(takes="features", gives="whole"),
}

_Collective = Callable[[Network, float, Sequence[int]], float]

#: (layout, another) -> collectives of a tensor that changes between them, and of its gradient.
CHANGES: Mapping[tuple[str, str], tuple[_Collective | None, _Collective | None]] = {
    ("batch", "whole"): (Network.all_gather_s, None),
    ("whole", "batch"): (None, Network.all_gather_s),
    ("features", "whole"): (Network.all_gather_s, None),
    ("whole", "features"): (None, Network.all_gather_s),
    ("batch", "features"): (Network.all_to_all_s, Network.all_to_all_s),
    ("features", "batch"): (Network.all_to_all_s, Network.all_to_all_s),
}


def split_names(operator: Operator, replicas: int) -> tuple[str, ...]:
    """The splits that are possible for an operator on some devices; on one device they are all the same."""
    if replicas == 1:
        return (ALL_BATCH,)
    linear = operator.linear
    divided = () if linear is None else tuple(name for name in ("columns", "rows") if getattr(linear, name))
    return (ALL_BATCH, "replicated", *divided)


def is_batch(splits: Iterable[str]) -> bool:
    """Whether a stage divides nothing but the batch."""
    return all(name == ALL_BATCH for name in splits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What operators and changes of layout take on each device.

    Attributes:
        forward_s, backward_s: seconds of one micro-batch, collectives included.
        synced_bytes: of parameters whose gradients are all-reduced once per batch.
        weight_bytes: of parameters.
        activation_bytes: kept per example of the micro-batches in flight.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    synced_bytes: float = 0.0
    weight_bytes: float = 0.0
    activation_bytes: float = 0.0


_NOTHING = Work()


def _sum(works: Sequence[Work]) -> Work:
    return Work(**{each.name: sum(getattr(work, each.name) for work in works) for each in fields(Work)})


class SplitModel:
    """Costs of the operators of a stage, by their splits.

    Args:
        model: the cost model.
        replicas: devices of the stage.
        microbatches: per batch.
        ranks: of the stage; default: the first ones, on the slowest devices of the cluster.
    """

    def __init__(self, model: CostModel, replicas: int, microbatches: int, ranks: Sequence[int] | None = None) -> None:
        self.model = model
        self.replicas = replicas
        self.microbatches = microbatches
        self.ranks = range(replicas) if ranks is None else ranks
        self.speed = model.speed if ranks is None else model.cluster.speed(ranks)
        self.examples = model.batch_examples / microbatches
        self._operators: dict[tuple[int, str], Work] = {}
        self._changes: dict[tuple[float, str, str], Work] = {}

    def operator(self, number: int, split: str) -> Work:
        """An operator with its own collectives, and the change of what enters it from outside the model."""
        key = number, split
        if key not in self._operators:
            self._operators[key] = self._operator(number, split)
        return self._operators[key]

    def _operator(self, number: int, split: str) -> Work:
        operator, n = self.model.graph.operators[number], self.replicas
        examples = self.examples if split == "replicated" else self.examples / n
        forward_s = operator.forward.at(examples) / self.speed
        backward_s = operator.backward.at(examples) / self.speed
        weights, activations = operator.param_bytes, operator.activation_bytes
        linear = operator.linear
        if linear is not None and split == "columns":
            weights /= n
            backward_s += self._collective(Network.all_reduce_s, linear.input_bytes)
        elif linear is not None and split == "rows":
            weights -= linear.weight_bytes * (n - 1) / n
            forward_s += self._collective(Network.all_reduce_s, linear.output_bytes)
        own = Work(
            forward_s=forward_s,
            backward_s=backward_s,
            synced_bytes=weights if split == ALL_BATCH else 0.0,
            weight_bytes=weights,
            activation_bytes=activations if SPLITS[split].gives == "whole" else activations / n,
        )
        if not operator.entering_bytes:
            return own
        return _sum([own, self.change(operator.entering_bytes, "batch", SPLITS[split].takes)])

    def change(self, num_bytes: float, before: str, after: str) -> Work:
        """A tensor of so many bytes per example changes its layout. What arrives is kept beside the tensor."""
        if before == after or self.replicas == 1:
            return _NOTHING
        key = num_bytes, before, after
        if key not in self._changes:
            self._changes[key] = self._change(*key)
        return self._changes[key]

    def _change(self, num_bytes: float, before: str, after: str) -> Work:
        there, back = CHANGES[before, after]
        kept = 0.0 if there is None else num_bytes / (1 if after == "whole" else self.replicas)
        return Work(
            forward_s=self._collective(there, num_bytes),
            backward_s=self._collective(back, num_bytes),
            activation_bytes=kept,
        )

    def _collective(self, collective: _Collective | None, num_bytes: float) -> float:
        """Seconds of a collective on a micro-batch's tensor."""
        return (
            0.0 if collective is None else collective(self.model.cluster.network, num_bytes * self.examples, self.ranks)
        )

    def stage(self, mask: int, splits: Sequence[str]) -> Work:
        """All operators of a stage.

        Args:
            mask: the operators.
            splits: of each, in topological order; empty: all divide the batch.
        """
        graph = self.model.graph
        own = [n for n in graph.order if mask >> n & 1]
        split_of = {n: SPLITS[name] for n, name in zip(own, splits or [ALL_BATCH] * len(own), strict=True)}
        works = []
        for number, name in zip(own, splits or [ALL_BATCH] * len(own), strict=True):
            works.append(self.operator(number, name))
            for producer in members(graph.producers[number]):
                before = split_of[producer].gives if producer in split_of else "batch"
                works.append(self.change(graph.operators[producer].output_bytes, before, split_of[number].takes))
            if graph.consumers[number] & ~mask or not graph.consumers[number]:
                works.append(self.change(graph.operators[number].output_bytes, split_of[number].gives, "batch"))
        return _sum([work for work in works if work is not _NOTHING])

    def time_per_example(self, work: Work, transfer_bytes: float) -> float:
        """Seconds per example of a stage, as `CostModel.time_per_example`.

        Args:
            work: of the stage.
            transfer_bytes: per example, that it receives and sends.
        """
        batch = self.model.batch_examples
        busy = (work.forward_s + work.backward_s) * self.microbatches / batch
        transfer = transfer_bytes / (self.model.rank_bandwidth_bytes_per_s * self.replicas)
        per_byte_s, fixed_s = self.model.ring(self.replicas)
        return max(busy, transfer) + (work.synced_bytes * per_byte_s + fixed_s) / batch


def bottleneck(model: CostModel, layout: Iterable[Placed]) -> float:
    """Seconds per example of the slowest stage, whatever the splits."""
    return max(_time_per_example(model, stage) for stage in layout)


def _time_per_example(model: CostModel, stage: Placed) -> float:
    totals = model.totals(stage.mask)
    if is_batch(stage.splits):
        return model.time_per_example(totals, stage.replicas, stage.microbatches)
    splits = SplitModel(model, stage.replicas, stage.microbatches)
    return splits.time_per_example(splits.stage(stage.mask, stage.splits), totals.transfer_bytes)
