"""`operator_graph`: measured costs of a model's operators: forward and backward seconds, activation and output bytes.

    ModelParts ──each operator alone, at several sizes──> OperatorGraph: a linear fit per operator
    StagedModel ──a forward of one stage──> `activation_bytes` of a micro-batch

Costs are medians after warm-up, on random inputs. Modules are copied, so the model's gradients and buffers do not
change. The state of the random generators is restored.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from bagpipe.cluster.model import Device
from bagpipe.errors import InputError
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.pipeline.stage.backward import Graph, backward
from bagpipe.pipeline.stage.linear_layers import linear_layer
from bagpipe.pipeline.stage.roofline import Roofline
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import split_parts
from bagpipe.split.staged_model import StagedModel, StageValue
from bagpipe.split.trace import device_of

__all__ = ["activation_bytes", "computed_graph", "operator_graph"]

#: Warm-up repeats, for allocators, thread pools and kernel selection.
WARM_REPEATS = 3


#: (model with one stage per operator or one for all, number of the stage, examples) -> seconds of forward and backward,
#: and bytes kept for the backward.
_TimeStage = Callable[[StagedModel, int, int], tuple[float, float, int]]


def operator_graph(
    parts: ModelParts,
    *,
    examples: Sequence[int] = (32, 256),
    repeats: int = 10,
    on_measured: Callable[[int, int], None] = lambda done, total: None,
) -> OperatorGraph:
    """Measured costs of a model's operators.

    Args:
        parts: the model.
        examples: at least two different micro-batch sizes for the linear fit.
        repeats: measurements per operator; the median is used.
        on_measured: called after each measurement with the number of those done and of all.

    Raises:
        InputError: there are fewer than two sizes, a number is below 1, or two operators share a parameter.
    """
    _check_counts(*examples, repeats)
    done = itertools.count(1)
    num_measured = (len(parts.operators) + 1) * len(set(examples)) * (WARM_REPEATS + repeats)

    def measured(staged: StagedModel, number: int, size: int) -> tuple[float, float, int]:
        return _time_operator(staged, number, size, repeats, lambda: on_measured(next(done), num_measured))

    return _graph(parts, examples, measured)


def computed_graph(
    parts: ModelParts, device: Device, *, dtype: str = "float32", examples: Sequence[int] = (32, 256)
) -> OperatorGraph:
    """Costs of a model's operators on another device, by its roofline: see `bagpipe.pipeline.stage.roofline`.

    Args:
        parts: the model; nothing of it is computed.
        device: whose rates count.
        dtype: of the matrix products, a key of `Device.flops`. Bytes are those of the model's tensors.
        examples: as of `operator_graph`.

    Raises:
        InputError: as `operator_graph`; or the device has no rate for the dtype.
    """
    _check_counts(*examples)

    def computed(staged: StagedModel, number: int, size: int) -> tuple[float, float, int]:
        bench = _Bench(staged, number, size, torch.device("meta"))
        with torch.enable_grad():
            with Roofline(device, dtype) as forward:
                graph = bench.forward()
            with Roofline(device, dtype) as whole:
                backward(graph, bench.gradients)
            return forward.seconds, whole.seconds, bench.kept_bytes()

    return _graph(parts, examples, computed)


def _graph(parts: ModelParts, examples: Sequence[int], time_stage: _TimeStage) -> OperatorGraph:
    """The operators with a line through their times at several sizes."""
    if len(set(examples)) < 2:
        raise InputError(f"expected at least two sizes of a micro-batch to measure, got {list(examples)}")
    names = [item.name for item in parts.operators]
    alone = split_parts(parts, stages={name: number for number, name in enumerate(names)})
    whole = split_parts(parts, stages=1)
    sizes = sorted(set(examples))
    with _random_numbers_kept(device_of(parts.traced.model)):
        times = [[time_stage(alone, number, size) for size in sizes] for number in range(len(names))]
        totals = [time_stage(whole, 0, size) for size in sizes]
    forward, full_backward = (
        _scaled([[item[part] for item in row] for row in times], [item[part] for item in totals]) for part in (0, 1)
    )
    return OperatorGraph(
        operators=tuple(
            Operator(
                name=name,
                forward=_line(sizes, forward[number]),
                backward=_line(sizes, full_backward[number]),
                param_bytes=_param_bytes(alone.stages[number].module),
                activation_bytes=times[number][-1][2] / sizes[-1],
                output_bytes=_output_bytes(alone, number),
                entering_bytes=_entering_bytes(alone, number),
                linear=linear_layer(parts, item),
            )
            for number, (name, item) in enumerate(zip(names, parts.operators, strict=True))
        ),
        edges=tuple((names[source], item.name) for item in parts.operators for source in item.inputs),
    )


def activation_bytes(staged: StagedModel, stage: int, examples: int) -> tuple[int, int]:
    """Bytes that a stage keeps of a micro-batch between forward and backward, and the part of them that are inputs.

    Args:
        staged: the model.
        stage: number of the stage.
        examples: of the micro-batch.
    """
    with _random_numbers_kept(device_of(staged.model)), torch.enable_grad():
        bench = _Bench(staged, stage, examples)
        inputs = sum(tensor.nbytes for tensor in bench.inputs) + bool(bench.head_positions) * bench.labels.nbytes
        return bench.kept_bytes() + inputs, inputs


def _time_operator(
    staged: StagedModel, number: int, examples: int, repeats: int, on_measured: Callable[[], None]
) -> tuple[float, float, int]:
    """Seconds of forward and backward, and bytes kept for the backward."""
    bench = _Bench(staged, number, examples)
    with torch.enable_grad():
        measured = []
        for _ in range(WARM_REPEATS + repeats):
            measured.append(bench.measure())
            on_measured()
        forward, whole = zip(*measured[WARM_REPEATS:], strict=True)
        return statistics.median(forward), statistics.median(whole), bench.kept_bytes()


class _Bench:
    """One stage on random inputs; on the model's device unless another one is given."""

    def __init__(self, staged: StagedModel, number: int, examples: int, device: torch.device | None = None) -> None:
        stage = staged.stages[number]
        self.device = device_of(staged.model) if device is None else device
        self.examples = examples
        self.module: nn.Module = copy.deepcopy(stage.module).to(self.device)
        self.in_values = [staged.values[n] for n in stage.inputs]
        self.inputs = [_random(value, examples, self.device) for value in self.in_values]
        self.out_positions = [
            position
            for position, n in enumerate(stage.outputs)
            if staged.values[n].consumers and staged.values[n].wants_grad
        ]
        self.gradients = [_random(staged.values[stage.outputs[p]], examples, self.device) for p in self.out_positions]
        self.head_positions = [stage.outputs.index(n) for _, n in stage.heads]
        self.labels = torch.rand(examples, device=self.device).round()

    def forward(self) -> Graph:
        leaves = [
            tensor.detach().requires_grad_(value.wants_grad)
            for tensor, value in zip(self.inputs, self.in_values, strict=True)
        ]
        outputs = self.module(*leaves)
        roots = [outputs[position] for position in self.out_positions]
        terms = [_binary_cross_entropy(0, outputs[p], self.labels.to(outputs[p].dtype)) for p in self.head_positions]
        if terms:
            roots.append(torch.stack(terms).sum() / self.examples)
        return Graph([leaf for leaf in leaves if leaf.requires_grad], roots)

    def measure(self) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        start_s = _now_s(self.device)
        graph = self.forward()
        turn_s = _now_s(self.device)
        backward(graph, self.gradients)
        return turn_s - start_s, _now_s(self.device) - turn_s

    def kept_bytes(self) -> int:
        """Bytes of distinct storages kept for the backward or sent, excluding parameters and inputs."""
        held = {tensor.untyped_storage().data_ptr() for tensor in (*self.inputs, self.labels)}
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
    """Seconds by operator and size, scaled so that their sum is the whole model's time at every size.

    An operator measured alone includes a call and an autograd pass, which the operators of a stage share.
    """
    sums = [sum(column) for column in zip(*seconds, strict=True)]
    return [[own * total / all_ for own, total, all_ in zip(row, totals, sums, strict=True)] for row in seconds]


def _param_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def _output_bytes(staged: StagedModel, number: int) -> int:
    """Bytes per example sent to other stages."""
    sent = [staged.values[n] for n in staged.stages[number].outputs if staged.values[n].consumers]
    return sum(torch.Size(value.shape).numel() * value.dtype.itemsize for value in sent)


def _entering_bytes(staged: StagedModel, number: int) -> int:
    """Bytes per example taken from the embedding stage: dense inputs and embedding vectors."""
    taken = [staged.values[n] for n in staged.stages[number].inputs if n in staged.embedding_values]
    return sum(torch.Size(value.shape).numel() * value.dtype.itemsize for value in taken)


def _line(sizes: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Least-squares line with non-negative coefficients."""
    slope, start = statistics.linear_regression(sizes, seconds)
    if slope <= 0:
        return Cost(fixed_s=statistics.fmean(seconds))
    if start < 0:
        slope, start = sum(x * y for x, y in zip(sizes, seconds, strict=True)) / sum(x * x for x in sizes), 0.0
    return Cost(fixed_s=start, per_example_s=slope)


def _check_counts(*counts: int) -> None:
    if min(counts) < 1:
        raise InputError(f"expected at least 1 example and 1 repeat to measure, got {list(counts)}")


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _random(value: StageValue, examples: int, device: torch.device) -> Tensor:
    drawn = torch.randn(examples, *value.shape, device=device)
    return drawn.to(value.dtype) if value.dtype.is_floating_point else torch.zeros_like(drawn, dtype=value.dtype)


def _now_s(device: torch.device) -> float:
    """The clock after synchronising the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _binary_cross_entropy(head: int, logits: Tensor, labels: Tensor) -> Tensor:
    own = labels.view(-1, *[1] * (logits.dim() - 1)).expand_as(logits)
    return functional.binary_cross_entropy_with_logits(logits, own, reduction="sum")
