"""What stages and operators cost on this machine: seconds of F, B, I and W, bytes kept and bytes sent.

    StagedModel ──random inputs, warm, median of repeats──> stage_costs: {"0F": seconds, …} for the simulator
    Parts ──every operator a stage of its own, several sizes──> operator_graph: straight lines for the partitioner

No store and no rows: inputs are random tensors of the values' shapes. A stage is copied to be measured, so neither its
parameters' gradients nor its buffers change; random numbers are put back.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bagpipe.errors import InputError
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.stages.backward import Graph, SplitBackward, backward
from bagpipe.stages.operators import Parts
from bagpipe.stages.split import split_parts
from bagpipe.stages.staged import StagedModel
from bagpipe.stages.trace import device_of

__all__ = ["StageTimes", "operator_graph", "stage_costs", "time_stage"]

#: Repeats that are not counted: allocators, thread pools and kernels' own choices settle in them.
WARM_REPEATS = 3

#: Sum of the losses of some logits and labels of equal shape.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the actions of one micro-batch, and bytes that live between forward and backward.

    Attributes:
        forward_s, backward_s: F and B.
        inputs_s, weights_s: I and W.
        activation_bytes: of what the forward keeps for the backward, and its outputs; not its inputs.
    """

    forward_s: float
    backward_s: float
    inputs_s: float
    weights_s: float
    activation_bytes: int


def stage_costs(
    staged: StagedModel, microbatch_examples: int, *, repeats: int = 20, loss: Loss | None = None
) -> dict[str, float]:
    """Seconds by stage and op, as `simulate` takes them: ``0F``, ``0B``, ``0I``, ``0W``, ``1F`` …

    Args:
        staged: the model, in the mode it trains in.
        microbatch_examples: examples of a micro-batch.
        repeats: measurements of which the median is taken.
        loss: of a head; default: binary cross entropy on logits.

    Raises:
        InputError: a number below 1.
    """
    costs: dict[str, float] = {}
    for number in range(len(staged.stages)):
        times = time_stage(staged, number, microbatch_examples, repeats=repeats, loss=loss)
        costs[f"{number}F"] = times.forward_s
        costs[f"{number}B"] = times.backward_s
        costs[f"{number}I"] = times.inputs_s
        costs[f"{number}W"] = times.weights_s
    return costs


def operator_graph(parts: Parts, *, examples: Sequence[int] = (32, 256), repeats: int = 10) -> OperatorGraph:
    """Measured costs of a model's operators.

    Args:
        parts: the model.
        examples: at least two different sizes of a micro-batch; costs are the straight line nearest to them.
        repeats: measurements of each, of which the median is taken.

    Raises:
        InputError: fewer than two sizes, a number below 1, or a parameter that two operators share.
    """
    if len(set(examples)) < 2:
        raise InputError(f"expected at least two sizes of a micro-batch to measure, got {list(examples)}")
    names = [item.name for item in parts.operators]
    alone = split_parts(parts, stages={name: number for number, name in enumerate(names)})
    whole = split_parts(parts, stages=1)
    sizes = sorted(set(examples))
    times = [[time_stage(alone, number, size, repeats=repeats) for size in sizes] for number in range(len(names))]
    totals = [time_stage(whole, 0, size, repeats=repeats) for size in sizes]
    forward = _scaled([[item.forward_s for item in row] for row in times], [item.forward_s for item in totals])
    full_backward = _scaled([[item.backward_s for item in row] for row in times], [item.backward_s for item in totals])
    return OperatorGraph(
        operators=tuple(
            Operator(
                name=name,
                forward=_line(sizes, forward[number]),
                backward=_line(sizes, full_backward[number]),
                param_bytes=_param_bytes(alone.stages[number].module),
                activation_bytes=times[number][-1].activation_bytes / sizes[-1],
                output_bytes=_output_bytes(alone, number),
            )
            for number, name in enumerate(names)
        ),
        edges=tuple((names[source], item.name) for item in parts.operators for source in item.inputs),
    )


def time_stage(
    staged: StagedModel, number: int, examples: int, *, repeats: int = 20, loss: Loss | None = None
) -> StageTimes:
    """Measure one stage.

    Args:
        staged: the model.
        number: of the stage.
        examples: of the micro-batch.
        repeats: measurements of which the median is taken.
        loss: as for `stage_costs`.

    Raises:
        InputError: a number below 1.
    """
    if examples < 1 or repeats < 1:
        raise InputError(f"expected at least 1 example and 1 repeat, got {examples} and {repeats}")
    bench = _Bench(staged, number, examples, loss or _binary_cross_entropy)
    cuda = [bench.device] if bench.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), torch.enable_grad():
        bench.draw()
        activation_bytes = bench.kept_bytes()
        measured = [bench.measure() for _ in range(WARM_REPEATS + repeats)][WARM_REPEATS:]
    forward, whole, inputs, weights = (statistics.median(seconds) for seconds in zip(*measured, strict=True))
    return StageTimes(
        forward_s=forward,
        backward_s=whole,
        inputs_s=inputs,
        weights_s=weights,
        activation_bytes=activation_bytes,
    )


class _Bench:
    """One stage on random inputs."""

    def __init__(self, staged: StagedModel, number: int, examples: int, loss: Loss) -> None:
        stage = staged.stages[number]
        self.device = device_of(staged.model)
        self.examples = examples
        self.module: nn.Module = copy.deepcopy(stage.module)
        self.loss = loss
        self.in_values = [staged.values[n] for n in stage.inputs]
        self.sent = [
            place for place, n in enumerate(stage.outputs) if staged.values[n].consumers and staged.values[n].wants_grad
        ]
        self.head_places = [stage.outputs.index(n) for _, n in stage.heads]
        self.split = SplitBackward([p for p in self.module.parameters() if p.requires_grad])
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.labels: list[Tensor] = []

    def draw(self) -> None:
        """Random inputs, gradients of what is sent, labels."""
        for value in self.in_values:
            shape = (self.examples, *value.shape)
            drawn = torch.randn(shape, device=self.device, dtype=torch.float32)
            self.inputs.append(
                drawn.to(value.dtype) if value.dtype.is_floating_point else drawn.new_zeros(shape, dtype=value.dtype)
            )
        outputs = self.module(*self.leaves())
        self.gradients = [torch.randn_like(outputs[place]) for place in self.sent]
        self.labels = [torch.rand_like(outputs[place]).round() for place in self.head_places]

    def leaves(self) -> list[Tensor]:
        return [
            tensor.detach().requires_grad_(value.wants_grad)
            for tensor, value in zip(self.inputs, self.in_values, strict=True)
        ]

    def forward(self) -> Graph:
        leaves = self.leaves()
        outputs = self.module(*leaves)
        roots = [outputs[place] for place in self.sent]
        if self.head_places:
            terms = [self.loss(outputs[p], label) for p, label in zip(self.head_places, self.labels, strict=True)]
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            roots.append(total / self.examples)
        return Graph([leaf for leaf in leaves if leaf.requires_grad], roots)

    def measure(self) -> tuple[float, float, float, float]:
        """Seconds of F, B, I, W, each once."""
        times = [self.now_s()]
        graph = self.forward()
        times.append(self.now_s())
        backward(graph, self.gradients)
        times.append(self.now_s())
        graph = self.forward()
        times.append(self.now_s())
        kept = self.split.inputs(graph, self.gradients)
        del graph
        times.append(self.now_s())
        self.split.weights(kept)
        times.append(self.now_s())
        first, whole, _, inputs, weights = (after - before for before, after in pairwise(times))
        return first, whole, inputs, weights

    def now_s(self) -> float:
        """The clock, when all that was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def kept_bytes(self) -> int:
        """Bytes of different storages kept for the backward or sent; parameters and inputs are not counted."""
        held = {tensor.untyped_storage().data_ptr() for tensor in (*self.inputs, *self.labels)}
        held |= {tensor.untyped_storage().data_ptr() for tensor in (*self.module.parameters(), *self.module.buffers())}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            graph = self.forward()
            for root in graph.roots:
                keep(root)
        return sum(kept.values())


def _scaled(seconds: Sequence[Sequence[float]], totals: Sequence[float]) -> list[list[float]]:
    """Seconds by operator and size, scaled so that for every size they add up to the whole's.

    Alone, each operator pays for a call and a walk of autograd, which those of one stage share.
    """
    sums = [sum(column) for column in zip(*seconds, strict=True)]
    return [[own * total / all_ for own, total, all_ in zip(row, totals, sums, strict=True)] for row in seconds]


def _param_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _output_bytes(staged: StagedModel, number: int) -> int:
    """Per example, of what other stages take."""
    sent = [staged.values[n] for n in staged.stages[number].outputs if staged.values[n].consumers]
    return sum(torch.Size(value.shape).numel() * value.dtype.itemsize for value in sent)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """The nearest line by least squares with neither part below 0: noise makes no example pay back."""
    slope, start = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return Cost(fixed_s=statistics.fmean(seconds))
    if start < 0:
        slope, start = sum(x * y for x, y in zip(sizes, seconds, strict=True)) / sum(x * x for x in sizes), 0.0
    return Cost(fixed_s=start, per_example_s=slope)


def _binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
