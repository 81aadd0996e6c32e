"""`SerialReference`: what `run.verify` compares a job with: its batches in one thread, one stage after the other.

    record of a batch ──micro-batches of replicas, pipes and parts──> SerialVersions: losses, gradients
    gradients ──finite? K-FAC, limits──> steps                        or a batch that is left out

A job divides a stage's micro-batch among the ranks that hold its parts. The reference computes the parts one after the
other, each with the random numbers that the job's part has, and joins their results. Everything that a step depends on
is computed again: means over the examples that a partial backward reaches, factors of K-FAC, norms, which batches are
not finite, and the loss scale. Of rows it has the gradients of pooled vectors alone, so it takes the squared norm of
the rows' gradients from the job.

Compiled stages are computed operator by operator. Under autocast they are compiled here too: compiled code leaves out
roundings to halves that operators make, so after some batches nothing of the two would agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.loss import Loss
from bagpipe.dense.precision import Precision
from bagpipe.dense.precondition.capture import LayerCapture
from bagpipe.dense.precondition.kfac import KfacSettings
from bagpipe.dense.seeding import mix_seed, seeded
from bagpipe.dense.stage_module import DenseStage
from bagpipe.pipeline.stage.batches import bounds, part_intervals
from bagpipe.pipeline.stage.serial_versions import Backwards, SerialStage, SerialVersions, TrainedBatch
from bagpipe.schedule.ir.program import Program
from bagpipe.training.batch_records import BatchRecord
from bagpipe.training.serial_kfac import SerialKfac
from bagpipe.training.staged_dense import StagedDense

__all__ = ["ReferenceBatch", "ReferenceRules", "SerialReference"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceRules:
    """What the reference takes from the configuration.

    Attributes:
        make_program: (batches) -> program of the schedule, whose table of versions the reference follows.
        make_optimizer: a new optimizer of some parameters.
        loss: of the model's outputs.
        seed: of dropout.
        kfac: numbers of K-FAC; None: gradients are not preconditioned.
    """

    make_program: Callable[[int], Program]
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    loss: Loss
    seed: int
    kfac: KfacSettings | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceBatch:
    """A batch that the reference has trained.

    Attributes:
        loss: sum over its examples.
        gradients: position of a value of the embedding stage -> its gradient, ``[num_examples, …]``, as rows get it.
        is_left_out: it is not finite, and changed nothing.
        scale: of the batch's loss, by which the job's gradients of pooled vectors are multiplied.
        row_factor: by which a limit of the norm multiplies the rows' gradients.
    """

    loss: float
    gradients: Mapping[int, Tensor]
    is_left_out: bool
    scale: float
    row_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A micro-batch of one pipe of a replica.

    Attributes:
        replica, pipe, number: which one.
        first, end: its examples in the global batch.
        pieces: by stage, first example, end, and rank of each part.
    """

    replica: int
    pipe: int
    number: int
    first: int
    end: int
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]


class SerialReference:
    """See the module.

    Args:
        dense: the dense part of the job.
        modules: by stage, copies with the initial weights; the reference trains them.
        copies: id of a tensor of the job -> its copy.
        num_batches: how many will be trained at most.
        rules: of the job.
    """

    def __init__(
        self,
        dense: StagedDense,
        modules: Sequence[nn.Module],
        copies: Mapping[int, Any],
        num_batches: int,
        rules: ReferenceRules,
    ) -> None:
        self._dense = dense
        self._pipeline = dense.pipeline
        self._copies = copies
        self._rules = rules
        self._scale = dense.precision.loss_scale
        self._rate, self._row_factor = math.nan, 1.0
        self._row_squares: Tensor | None = None
        self._record: BatchRecord
        self._is_left_out = False
        self._batch = -1
        staged = self._pipeline.staged
        inner = [*modules] if _is_rounded(dense.precision) else [*map(_by_operator, modules)]
        self._stages = [_Parts(module, stage.uses_random) for module, stage in zip(inner, staged.stages, strict=True)]
        names = {id(copies[id(parameter)]): name for name, parameter in dense.parameters.items()}
        self._kfac = None if rules.kfac is None else SerialKfac(inner, names, self._pipeline.mesh.holders, rules.kfac)
        self._versions = SerialVersions(
            [
                SerialStage(module=module, inputs=tuple(map(str, s.inputs)), outputs=tuple(map(str, s.outputs)))
                for module, s in zip(self._stages, staged.stages, strict=True)
            ],
            lambda number, parameters: self._optimizer(number),
            self._loss,
            rules.make_program(num_batches),
            self._prepare,
        )

    def train(self, record: BatchRecord, *, rate: float, row_squares: Tensor | None) -> ReferenceBatch:
        """Train the next batch.

        Args:
            record: of all its examples.
            rate: learning rate of its steps.
            row_squares: float64 scalar, squared norm of the gradients of its rows; None: nothing depends on it.
        """
        self._batch += 1
        self._record, self._rate, self._row_squares = record, rate, row_squares
        units = [unit for unit in self._units(record.size) if unit.first < unit.end]
        backwards, scale = self._backwards(units), self._scale.value
        for number, stage in enumerate(self._stages):
            stage.parts = [
                [
                    _Part(
                        size=end - first,
                        seed=mix_seed(self._rules.seed, self._batch, number, first),
                        capture=self._capture(number, rank) if backwards.has(place, number) else None,
                    )
                    for first, end, rank in unit.pieces[number]
                ]
                for place, unit in enumerate(units)
            ]
        parts = [self._values(unit) for unit in units]
        buffers = [buffer.clone() for stage in self._stages for buffer in stage.buffers()]
        trained = self._versions.train(parts, backwards)
        if self._is_left_out:
            with torch.no_grad():
                for buffer, before in zip((b for s in self._stages for b in s.buffers()), buffers, strict=True):
                    buffer.copy_(before)
        self._scale = self._scale.after(is_finite=not self._is_left_out)
        return ReferenceBatch(
            loss=trained.loss * record.size,
            gradients=self._joined(trained, parts),
            is_left_out=self._is_left_out,
            scale=scale,
            row_factor=self._row_factor,
        )

    def take_over(self, weights: Mapping[str, Tensor]) -> None:
        """Take the job's weights, by name, with which its next batch begins."""
        with torch.no_grad():
            for name, parameter in self._dense.parameters.items():
                self._copies[id(parameter)].copy_(weights[name])
        self._versions.keep()

    def _capture(self, stage: int, rank: int) -> LayerCapture | None:
        return None if self._kfac is None else self._kfac.capture(stage, rank, self._batch)

    def _joined(self, trained: TrainedBatch, parts: Sequence[Mapping[str, Tensor]]) -> dict[int, Tensor]:
        """Position of a value that wants a gradient -> its gradient, of all examples."""
        staged = self._pipeline.staged
        found: dict[int, Tensor] = {}
        for position, number in enumerate(staged.embedding_values):
            name = str(number)
            if parts and staged.values[number].wants_grad:
                pairs = zip(trained.gradients, parts, strict=True)
                found[position] = torch.cat([own.get(name, torch.zeros_like(given[name])) for own, given in pairs])
        return found

    def _values(self, unit: _Unit) -> dict[str, Tensor]:
        """What a micro-batch is given, by name."""
        staged, record = self._pipeline.staged, self._record
        wants = [staged.values[number].wants_grad for number in staged.embedding_values]
        return {
            **{
                str(number): value[unit.first : unit.end].clone().requires_grad_(wants_grad)
                for number, value, wants_grad in zip(staged.embedding_values, record.values, wants, strict=True)
            },
            "labels": record.labels[unit.first : unit.end],
        }

    def _units(self, size: int) -> Iterator[_Unit]:
        """The micro-batches of a global batch, replica after replica: the coarsest, where stages have several sizes."""
        mesh, step = self._pipeline.mesh, self._pipeline.step
        micro = {instance.number: step.program.micro_per_batch[instance.number] for instance in step.instances}
        count = math.gcd(*micro.values())
        for replica in range(mesh.num_replicas):
            begin, end = mesh.examples(replica, size)
            for pipe, (a, b) in enumerate(pairwise(bounds(end - begin, step.num_pipes))):
                for number, (first, last) in enumerate(part_intervals(b - a, count)):
                    pieces: list[list[tuple[int, int, int]]] = [[] for _ in self._stages]
                    for instance in (instance for instance in step.instances if instance.pipe == pipe):
                        every = part_intervals(b - a, micro[instance.number], instance.part, instance.parts)
                        own = micro[instance.number] // count
                        rank = replica * step.num_processes + instance.process
                        pieces[instance.stage] += [
                            (begin + a + lower, begin + a + upper, rank)
                            for lower, upper in every[number * own : (number + 1) * own]
                            if lower < upper
                        ]
                    yield _Unit(
                        replica=replica,
                        pipe=pipe,
                        number=number,
                        first=begin + a + first,
                        end=begin + a + last,
                        pieces=tuple(tuple(sorted(each)) for each in pieces),
                    )

    def _backwards(self, units: Sequence[_Unit]) -> Backwards:
        """Which stages compute the backwards of the batch, and the factors that make their gradients means."""
        partial_backward, scale = self._pipeline.partial_backward, self._scale.value
        if partial_backward is None:
            return Backwards(scale=scale)
        rule, stages = partial_backward.rule, range(len(self._stages))
        computed = [
            {s for s in stages if rule.computes(s, self._batch, rule.unit(unit.replica, unit.pipe, unit.number))}
            for unit in units
        ]
        factors: dict[int, float] = {}
        for stage in stages:
            count = sum(unit.end - unit.first for unit, own in zip(units, computed, strict=True) if stage in own)
            if count:
                factors[stage] = self._record.size / count
        return Backwards(computed=computed, factors=factors, scale=scale)

    def _prepare(self, trained: TrainedBatch) -> bool:
        """Between gradients and steps: whether the batch is finite, and then K-FAC and the limits."""
        parameters = [self._copies[id(parameter)] for parameter in self._dense.parameters.values()]
        graded = [parameter for parameter in parameters if parameter.grad is not None]
        found = [*(p.grad for p in graded), *(g for own in trained.gradients for g in own.values())]
        is_finite = math.isfinite(trained.loss) and all(bool(torch.isfinite(gradient).all()) for gradient in found)
        self._is_left_out = self._dense.skips_nonfinite and not is_finite
        self._row_factor = 1.0
        done = [part for stage in self._stages for part in stage.done]
        for stage in self._stages:
            stage.done = []
        if self._kfac is not None:
            calls = [(part.capture, index, part.size) for part, index in done if part.capture is not None]
            factor = self._record.size / self._scale.value
            self._kfac.apply(self._batch, calls, factor=factor, lr=self._rate, is_left_out=self._is_left_out)
        if not self._is_left_out:
            limited = self._dense.clip.apply(graded, self._row_squares)
            if limited is not None and limited.row_factor is not None:
                self._row_factor = float(limited.row_factor)
        return not self._is_left_out

    def _optimizer(self, stage: int) -> torch.optim.Optimizer | None:
        """A new optimizer of the copies of a stage's parameters, with the rates of the job's."""
        own = [parameter for _, parameter in self._pipeline.staged.parameters_of(stage)]
        if not own:
            return None
        optimizer = self._rules.make_optimizer(own)
        for group in optimizer.param_groups:
            group["params"] = [self._copies[id(parameter)] for parameter in group["params"]]
        for parameter in own:
            if parameter in optimizer.state:  # Adagrad has some from the beginning
                optimizer.state[self._copies[id(parameter)]] = optimizer.state.pop(parameter)

        def prepare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = self._rate

        optimizer.register_step_pre_hook(prepare)
        return optimizer

    def _loss(self, values: Mapping[str, Tensor]) -> Tensor:
        heads = [head for stage in self._pipeline.staged.stages for head in stage.heads]
        total = torch.zeros(())
        for position, (head, number) in enumerate(heads):
            term = self._rules.loss.of_head(head, values[str(number)].reshape(-1), values["labels"])
            total = term if not position else total + term
        return total / self._record.size


def _is_rounded(precision: Precision) -> bool:
    """Whether operators round their results to halves, which compiled code leaves out where it joins operators."""
    return precision.autocast_dtype is not None


def _by_operator(module: nn.Module) -> nn.Module:
    return module.by_operator() if isinstance(module, DenseStage) else module


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    """A part of a micro-batch in a stage.

    Attributes:
        size: number of examples.
        seed: of its forward.
        capture: of the stage's linear layers; None: they are not captured.
    """

    size: int
    seed: int
    capture: LayerCapture | None


class _Parts(nn.Module):
    """A stage that computes the parts of a micro-batch as the job's ranks do, and joins them.

    Attributes:
        parts: of the forwards to come; not empty.
        done: parts of those that are over, with a number of each.
    """

    def __init__(self, inner: nn.Module, uses_random: bool) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training
        self.parts: list[list[_Part]] = []
        self.done: list[tuple[_Part, int]] = []
        self._uses_random = uses_random

    def forward(self, *inputs: Tensor) -> Any:
        parts = self.parts.pop(0)
        if len(parts) == 1:
            return self._part(parts[0], inputs)
        sizes = [part.size for part in parts]
        divided = zip(*(torch.split(value, sizes) for value in inputs), strict=True)
        found = [self._part(part, own) for part, own in zip(parts, divided, strict=True)]
        if isinstance(found[0], Tensor):
            return torch.cat(found)
        return tuple(map(torch.cat, zip(*found, strict=True)))

    def _part(self, part: _Part, inputs: tuple[Tensor, ...]) -> Any:
        number = len(self.done)
        self.done.append((part, number))
        forward = partial(self._seeded, part.seed, inputs)
        return forward() if part.capture is None else part.capture.during(number, forward)

    def _seeded(self, seed: int, inputs: tuple[Tensor, ...]) -> Any:
        if not self._uses_random:
            return self.inner(*inputs)
        with seeded(seed, inputs[0].device):
            return self.inner(*inputs)
