"""`Verification`: the first batches of a job in stages, computed once more by a serial reference and compared.

    lanes     pooled vectors and their gradients, labels, losses, learning rates of N batches ──> records, on each rank
    verify    initial weights, records ──SerialVersions──> losses, gradients, weights after N batches
              ──largest differences──> Verified, on all ranks

The reference trains in one thread by the schedule's table of versions, with torch's operators and autograd, from a copy
of the initial weights. It reads what the lookups gave, so rows are compared by the gradients that they get, and not by
their values. What is recorded stays in memory until then: per example the pooled vectors twice. Replicas of the
pipeline record their examples each; all are gathered for the comparison, as initial and new weights are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.loss import Loss
from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import InputError, JobError
from bagpipe.pipeline.stage.batches import bounds
from bagpipe.pipeline.stage.seeding import mix_seed, seeded
from bagpipe.pipeline.stage.serial_versions import SerialStage, SerialVersions
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey, Program
from bagpipe.training.batch_records import BatchRecord, join_records, keeper
from bagpipe.training.part import Hook, LoopPart, LoopRun
from bagpipe.training.staged_dense import StagedDense

__all__ = ["TOLERANCES", "Verification", "Verified"]

#: Largest difference allowed, relative to the largest element of what is compared. Sums of a batch have an order of
#: their own in each micro-batch, so equal bits are not asked for.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The comparison of a job's first batches with the reference.

    Attributes:
        batches: how many.
        tolerance: largest difference allowed.
        loss, gradients, weights: largest relative differences: of a batch's loss, of the gradients of its pooled
            vectors, of a dense parameter after the batches.
        worst: name of that parameter; empty: all are equal.
    """

    batches: int
    tolerance: float
    loss: float
    gradients: float
    weights: float
    worst: str

    @property
    def line(self) -> str:
        """What was found, in words."""
        worst = f" ({self.worst})" if self.worst else ""
        return (
            f"the first {self.batches} batches against the serial reference: largest relative difference of losses "
            f"{self.loss:.1e}, of gradients of pooled vectors {self.gradients:.1e}, of dense weights "
            f"{self.weights:.1e}{worst}; allowed {self.tolerance:.0e}"
        )

    def check(self) -> None:
        """Raise JobError if a difference is too large."""
        if not all(found <= self.tolerance for found in (self.loss, self.gradients, self.weights)):  # NaN is none
            raise JobError(f"run.verify: {self.line}")


class Verification(LoopPart):
    """Records the first batches of a job, and compares them.

    Args:
        dense: the dense part, its weights initial.
        num_batches: how many.
        make_program: (batches) -> program of the schedule, whose table of versions the reference follows.
        make_optimizer: a new optimizer of some parameters.
        loss: of the model's outputs.
        seed: of dropout.

    Attributes:
        num_batches: how many.
        found: of the comparison; None: not made.

    Raises:
        InputError: examples of a replica do not all begin at one rank, in one pipe.
    """

    name = "verification"

    def __init__(
        self,
        dense: StagedDense,
        num_batches: int,
        *,
        make_program: Callable[[int], Program],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        loss: Loss,
        seed: int,
    ) -> None:
        step = dense.pipeline.step
        if step.num_pipes > 1 or step.has_parts:
            raise InputError(
                f"run.verify: expected a pipeline in one direction, with each stage on one rank of a replica, got "
                f"pipeline.schedule {step.schedule} with {step.num_pipes} directions"
            )
        self.num_batches = num_batches
        self.found: Verified | None = None
        self._dense = dense
        self._make_program = make_program
        self._make_optimizer = make_optimizer
        self._loss = loss
        self._seed = seed
        self._units = step.program.micro_per_batch
        self._records: dict[int, BatchRecord] = {}
        #: By instance, whose lane alone writes them, and batch.
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._rates: dict[int, float] = {}
        self._before: dict[int, Tensor] = {}
        self._recorded: BatchRecord | None = None
        self._copies: dict[int, Any] = {}
        self._modules: list[nn.Module] = []
        self._run: LoopRun

    @property
    def is_recording(self) -> bool:
        """The job began with the initial weights, and is not compared yet."""
        return bool(self._modules)

    def start(self, run: LoopRun) -> None:
        self._run = run
        if run.first_batch:
            return
        staged = self._dense.pipeline.staged
        self._copies = {}
        with self._dense.evaluating():  # of other ranks' stages, `verify` gets the values
            self._modules = copy.deepcopy([stage.module for stage in staged.stages], self._copies)
        for parameter in (parameter for module in self._modules for parameter in module.parameters()):
            parameter.data = parameter.data.to(self._dense.pipeline.device)  # chunks wait on the host
        # The embedding stage is called once a batch, after the hook of its lookup and in its lane.
        self._handle = staged.embedding.register_forward_hook(self._note_values)

    def hooks(self) -> Iterable[Hook]:
        if self.is_recording:
            yield Hook(at=Point.LOOKUP, when="before", call=self._note_batch)
            yield Hook(at=Point.FORWARD, when="before", call=self._note_sum)
            yield Hook(at=Point.FORWARD, when="after", call=self._note_loss)
            yield Hook(at=Point.STEP, when="before", call=self._note_rate)

    def end(self) -> None:
        if self.is_recording:
            self._forget()

    def verify(
        self,
        num_batches: int,
        *,
        holders: Mapping[str, int],
        group: RankGroup | None,
        gather: Callable[[Any], list[Any]],
    ) -> Verified:
        """Compare. Collective; no lane acts.

        Args:
            num_batches: batches that all ranks have trained, at most `num_batches` of the part.
            holders: parameter -> a rank that trains it.
            group: all ranks; None: there is one.
            gather: JSON-able values of all ranks.
        """
        device = self._dense.pipeline.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the lanes recorded on streams of their own
        with self._dense.evaluating():
            weights = {name: p.detach().clone().to(device) for name, p in self._dense.parameters.items()}
        if group is not None:
            for name, parameter in self._dense.parameters.items():
                group.broadcast(weights[name], holders[name])
                group.broadcast(self._copies[id(parameter)], holders[name])
            self._records = join_records(self._records, num_batches, device, group, gather)
        losses = [0.0] * num_batches
        for (_, b), loss in self._losses.items():
            if b < num_batches:  # lanes may have begun the next one
                losses[b] += float(loss)
        noted = gather({"losses": losses, "rates": {str(b): rate for b, rate in self._rates.items()}})
        found: dict[str, Any] | None = None
        if group is None or group.rank == 0:
            sums = [sum(rank["losses"][b] for rank in noted) for b in range(num_batches)]
            rates = next(rank["rates"] for rank in noted if rank["rates"])
            found = asdict(self._compare(sums, [rates[str(b)] for b in range(num_batches)], weights))
        self._forget()
        (one,) = [each for each in gather(found) if each is not None]
        self.found = Verified(**one)
        return self.found

    def _note_batch(self, key: OpKey, b: int) -> None:
        self._recorded = None
        batch = self._run.in_flight[b]
        if b < self.num_batches and batch.inputs is not None:
            self._recorded = BatchRecord(size=batch.rank_batch.num_global_examples, labels=batch.inputs.labels)
            self._records[b] = self._recorded

    def _note_values(self, module: nn.Module, arguments: object, values: tuple[Tensor, ...]) -> None:
        record = self._recorded
        if record is None:
            return
        record.values = tuple(value.detach().clone() for value in values)
        for position, value in enumerate(values):
            if value.requires_grad:
                value.register_hook(keeper(record.gradients, position))  # type: ignore[no-untyped-call]

    def _note_sum(self, key: OpKey, index: int) -> None:
        b = index // self._units[key[0]]
        if b < self.num_batches:
            self._before[key[0]] = self._dense.loss_sums(b + 1)[str(key[0])].clone()

    def _note_loss(self, key: OpKey, index: int) -> None:
        b = index // self._units[key[0]]
        if b < self.num_batches:
            added = self._dense.loss_sums(b + 1)[str(key[0])] - self._before[key[0]]
            before = self._losses.get((key[0], b))
            self._losses[key[0], b] = added if before is None else before + added

    def _note_rate(self, key: OpKey, b: int) -> None:
        chunk = self._dense.chunk_of(key)
        if b < self.num_batches and chunk is not None and chunk.optimizer is not None:
            self._rates[b] = float(chunk.optimizer.param_groups[0]["lr"])

    def _forget(self) -> None:
        self._handle.remove()
        self._modules, self._copies, self._recorded = [], {}, None
        self._records, self._losses, self._rates = {}, {}, {}

    def _compare(self, losses: Sequence[float], rates: Sequence[float], weights: Mapping[str, Tensor]) -> Verified:
        staged = self._dense.pipeline.staged
        stages = [
            _Seeded(module, stage.uses_random) for module, stage in zip(self._modules, staged.stages, strict=True)
        ]
        rate = _Rate()
        reference = SerialVersions(
            [
                SerialStage(module=module, inputs=tuple(map(str, s.inputs)), outputs=tuple(map(str, s.outputs)))
                for module, s in zip(stages, staged.stages, strict=True)
            ],
            lambda number, parameters: self._optimizer(number, rate),
            self._reference_loss,
            self._make_program(len(losses)),
        )
        of_losses, of_gradients = [0.0], [0.0]
        for b, loss in enumerate(losses):
            rate.value, record = rates[b], self._records[b]
            parts = self._micro_batches(record)
            for number, stage in enumerate(stages):
                stage.seeds = [mix_seed(self._seed, b, number, first) for first, _ in parts]
            trained = reference.train([values for _, values in parts])
            expected = trained.loss * record.size
            of_losses.append(_relative(abs(loss - expected), abs(expected)))
            for position, found in record.gradients.items():
                name = str(staged.embedding_values[position])
                given = torch.cat(
                    [
                        gradients.get(name, torch.zeros_like(values[name]))
                        for gradients, (_, values) in zip(trained.gradients, parts, strict=True)
                    ]
                )
                of_gradients.append(_difference(found / self._dense.loss_scale.value, given))
        names = {name: id(p) for name, p in self._dense.parameters.items()}
        off = {name: _difference(weight, self._copies[names[name]].detach()) for name, weight in weights.items()}
        worst = max(off, key=lambda name: off[name])
        return Verified(
            batches=len(losses),
            tolerance=TOLERANCES[next(iter(weights.values())).dtype],
            loss=max(of_losses),
            gradients=max(of_gradients),
            weights=off[worst],
            worst=worst if off[worst] else "",
        )

    def _micro_batches(self, record: BatchRecord) -> list[tuple[int, dict[str, Tensor]]]:
        """Of each micro-batch with examples, replica after replica: its first one, and values by number."""
        staged, pipeline = self._dense.pipeline.staged, self._dense.pipeline
        wants = [staged.values[number].wants_grad for number in staged.embedding_values]
        return [
            (
                first,
                {
                    **{
                        str(number): value[first:end].clone().requires_grad_(wants_grad)
                        for number, value, wants_grad in zip(staged.embedding_values, record.values, wants, strict=True)
                    },
                    "labels": record.labels[first:end],
                    "size": torch.tensor(float(record.size), dtype=torch.float64),
                },
            )
            for replica in range(pipeline.mesh.num_replicas)
            for first, end in self._intervals(replica, record.size)
            if first < end
        ]

    def _intervals(self, replica: int, size: int) -> list[tuple[int, int]]:
        """The micro-batches of a replica: first and end in a global batch of that size."""
        pipeline = self._dense.pipeline
        begin, end = pipeline.mesh.examples(replica, size)
        return [(begin + a, begin + b) for a, b in pairwise(bounds(end - begin, pipeline.step.graph.microbatches))]

    def _optimizer(self, stage: int, rate: _Rate) -> torch.optim.Optimizer | None:
        """A new optimizer of the copies of a stage's parameters, with the rates of the job's."""
        own = [parameter for _, parameter in self._dense.pipeline.staged.parameters_of(stage)]
        if not own:
            return None
        optimizer = self._make_optimizer(own)
        for group in optimizer.param_groups:
            group["params"] = [self._copies[id(parameter)] for parameter in group["params"]]
        for parameter in own:
            if parameter in optimizer.state:  # Adagrad has some from the beginning
                optimizer.state[self._copies[id(parameter)]] = optimizer.state.pop(parameter)

        def prepare(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate.value
            self._dense.clip.apply(parameter for group in optimizer.param_groups for parameter in group["params"])

        optimizer.register_step_pre_hook(prepare)
        return optimizer

    def _reference_loss(self, values: Mapping[str, Tensor]) -> Tensor:
        heads = [head for stage in self._dense.pipeline.staged.stages for head in stage.heads]
        total = torch.zeros(())
        for position, (head, number) in enumerate(heads):
            term = self._loss.of_head(head, values[str(number)].reshape(-1), values["labels"])
            total = term if not position else total + term
        return total / int(values["size"])


@dataclass(slots=True)
class _Rate:
    """The learning rate of the batch that the reference trains."""

    value: float = math.nan


class _Seeded(nn.Module):
    """A stage whose forwards draw the random numbers of the job's.

    Attributes:
        seeds: of the batch's forwards, which are as many.
    """

    def __init__(self, inner: nn.Module, uses_random: bool) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training
        self.seeds: list[int] = []
        self._uses_random = uses_random

    def forward(self, *inputs: Tensor) -> Any:
        seed = self.seeds.pop(0)
        if not self._uses_random:
            return self.inner(*inputs)
        with seeded(seed, inputs[0].device):
            return self.inner(*inputs)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest element expected; inf where one is not a number."""
    if not expected.numel():
        return 0.0
    return _relative(float((found - expected).abs().max()), float(expected.abs().max()))


def _relative(difference: float, size: float) -> float:
    if not difference:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf
