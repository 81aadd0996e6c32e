"""`Verification`: the first batches of a job in stages, computed once more by a serial reference and compared.

    lanes     pooled vectors and their gradients, labels, losses, learning rates of N batches ──> records, on each rank
    verify    initial weights, records ──SerialReference──> losses, gradients, weights after N batches
              ──largest differences──> Verified, on all ranks

The reference trains in one thread by the schedule's table of versions, with torch's operators and autograd, from a copy
of the initial weights. It reads what the lookups gave, so rows are compared by the gradients that they get, and not by
their values. A batch that only one of the two leaves out differs infinitely.

Under autocast the last bit of a weight can put an activation on the other side of a border between two halves, or of a
kink, after which jobs differ visibly. So each batch is compared by itself: after it the reference takes over the job's
weights.

What is recorded stays in memory until then: per example the pooled vectors twice. Replicas of the pipeline record their
examples each; all are gathered for the comparison, as initial and new weights are.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import RankGroup
from bagpipe.errors import JobError
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.batch_records import BatchRecord, join_records, keeper
from bagpipe.training.part import Hook, LoopPart, LoopRun
from bagpipe.training.serial_reference import ReferenceRules, SerialReference
from bagpipe.training.staged_dense import StagedDense

__all__ = ["TOLERANCES", "Verification", "Verified", "tolerance"]

#: Largest difference allowed, relative to the largest element of what is compared. Sums of a batch have an order of
#: their own in each micro-batch, so equal bits are not asked for.
TOLERANCES: Mapping[torch.dtype, float] = {torch.float64: 1e-12, torch.float32: 1e-5}


#: Additions of half values, one after the other, whose order may be another one; each rounds by half of eps.
_HALF_ADDITIONS = 8


def tolerance(dtype: torch.dtype, autocast_dtype: torch.dtype | None = None) -> float:
    """Largest difference allowed.

    Under autocast forwards of the same weights have the same bits. Gradients of half values are added up in an order of
    the schedule's, and each addition rounds by half of eps of their type at most.

    Args:
        dtype: of the parameters, float32 or float64.
        autocast_dtype: of matrix products; None: that of their operands.
    """
    if autocast_dtype is None:
        return TOLERANCES[dtype]
    return max(TOLERANCES[dtype], _HALF_ADDITIONS * torch.finfo(autocast_dtype).eps / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The comparison of a job's first batches with the reference.

    Attributes:
        batches: how many.
        tolerance: largest difference allowed.
        loss, gradients, weights: largest relative differences: of a batch's loss, of the gradients of its pooled
            vectors times the factor of a limit of the norm, of a dense parameter after the batches, or after each.
        worst: name of that parameter; empty: all are equal.
        left_out: how many batches job and reference left out, because they are not finite.
    """

    batches: int
    tolerance: float
    loss: float
    gradients: float
    weights: float
    worst: str
    left_out: int

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
        rules: of the reference.

    Attributes:
        num_batches: how many.
        found: of the comparison so far; None: not made.
    """

    name = "verification"

    def __init__(self, dense: StagedDense, num_batches: int, rules: ReferenceRules) -> None:
        self.num_batches = num_batches
        self.found: Verified | None = None
        self._dense = dense
        self._rules = rules
        self._units = dense.pipeline.step.program.micro_per_batch
        self._records: dict[int, BatchRecord] = {}
        #: By instance, whose lane alone writes them, and batch.
        self._losses: dict[tuple[int, int], Tensor] = {}
        self._rates: dict[int, float] = {}
        #: By batch; None: no limit asks for them.
        self._row_squares: dict[int, Tensor | None] = {}
        self._row_factors: dict[int, Tensor | None] = {}
        self._are_left_out: dict[int, bool] = {}
        self._before: dict[int, Tensor] = {}
        self._recorded: BatchRecord | None = None
        self._copies: dict[int, Any] = {}
        self._modules: list[nn.Module] = []
        self._num_compared = 0
        self._reference: SerialReference | None = None
        self._run: LoopRun

    @property
    def is_recording(self) -> bool:
        """The job began with the initial weights, and is not compared yet."""
        return bool(self._modules)

    def is_due(self, num_batches: int) -> bool:
        """Whether `verify` is to be called after so many batches: after the last one, under autocast after each."""
        is_each = self._dense.precision.autocast_dtype is not None
        return self.is_recording and (num_batches == self.num_batches or (is_each and num_batches < self.num_batches))

    def start(self, run: LoopRun) -> None:
        self._run = run
        if run.first_batch:
            return
        staged = self._dense.pipeline.staged
        self._copies, self._num_compared = {}, 0
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
            yield Hook(at=Point.STEP, when="after", call=self._note_step)

    def end(self) -> None:
        if self.is_recording:
            self._forget(self.num_batches)

    def verify(
        self,
        num_batches: int,
        *,
        holders: Mapping[str, int],
        group: RankGroup | None,
        gather: Callable[[Any], list[Any]],
    ) -> Verified:
        """Compare the batches that are not compared yet. Collective; no lane acts.

        Args:
            num_batches: batches that all ranks have trained, at most `num_batches` of the part.
            holders: parameter -> a rank that trains it.
            group: all ranks; None: there is one.
            gather: JSON-able values of all ranks.

        Returns:
            Of all batches so far.
        """
        device = self._dense.pipeline.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the lanes recorded on streams of their own
        with self._dense.evaluating():
            weights = {name: p.detach().clone().to(device) for name, p in self._dense.parameters.items()}
        batches, records = range(self._num_compared, num_batches), self._records
        if group is not None:
            for name, parameter in self._dense.parameters.items():
                group.broadcast(weights[name], holders[name])
                if not self._num_compared:
                    group.broadcast(self._copies[id(parameter)], holders[name])
            records = join_records(records, batches, device, group, gather)
        losses = dict.fromkeys(batches, 0.0)
        for (_, b), loss in self._losses.items():
            if b in losses:  # lanes may have begun the next one
                losses[b] += float(loss)
        noted = gather({"losses": [*losses.values()], "steps": [asdict(step) for step in self._steps(batches)]})
        found: dict[str, Any] | None = None
        if group is None or group.rank == 0:
            sums = [sum(own) for own in zip(*(rank["losses"] for rank in noted), strict=True)]
            steps = [_Step(**step) for step in next((rank["steps"] for rank in noted if rank["steps"]), [])]
            found = asdict(self._compare([records[b] for b in batches], sums, steps, weights))
        self._forget(num_batches)
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
            self._before[key[0]] = self._dense.counted(key[0], b).clone()

    def _note_loss(self, key: OpKey, index: int) -> None:
        b = index // self._units[key[0]]
        if b < self.num_batches:
            added = self._dense.counted(key[0], b) - self._before[key[0]]
            before = self._losses.get((key[0], b))
            self._losses[key[0], b] = added if before is None else before + added

    def _note_rate(self, key: OpKey, b: int) -> None:
        chunk = self._dense.chunk_of(key)
        if b < self.num_batches and chunk is not None and chunk.optimizer is not None:
            self._rates[b] = float(chunk.optimizer.param_groups[0]["lr"])

    def _note_step(self, key: OpKey, b: int) -> None:
        if b < self.num_batches:
            batch = self._run.in_flight[b]
            self._row_squares[b], self._row_factors[b] = batch.row_squares, batch.row_factor
            self._are_left_out[b] = batch.is_skipped

    def _steps(self, batches: range) -> list[_Step]:
        """Of the batches; empty: this process steps nothing."""
        return [
            _Step(
                rate=self._rates[b],
                row_squares=None if (squares := self._row_squares[b]) is None else float(squares),
                row_factor=1.0 if (factor := self._row_factors[b]) is None else float(factor),
                is_left_out=self._are_left_out[b],
            )
            for b in (batches if self._rates else ())
        ]

    def _forget(self, num_batches: int) -> None:
        """Forget what is recorded of the batches before this one, and everything after the last one."""
        self._num_compared = num_batches
        noted: list[dict[int, Any]] = [self._records, self._rates, self._row_squares, self._row_factors]
        for each in [*noted, self._are_left_out]:
            for b in [b for b in each if b < num_batches]:
                del each[b]
        self._losses = {key: loss for key, loss in self._losses.items() if key[1] >= num_batches}
        if num_batches >= self.num_batches:
            self._handle.remove()
            self._modules, self._copies, self._recorded, self._reference = [], {}, None, None

    def _compare(
        self,
        records: Sequence[BatchRecord],
        losses: Sequence[float],
        steps: Sequence[_Step],
        weights: Mapping[str, Tensor],
    ) -> Verified:
        """Train the reference, and compare these batches, and weights after them; then it has the job's weights."""
        if self._reference is None:
            self._reference = SerialReference(self._dense, self._modules, self._copies, self.num_batches, self._rules)
        before = self.found
        of_losses = [0.0 if before is None else before.loss]
        of_gradients = [0.0 if before is None else before.gradients]
        left_out = 0 if before is None else before.left_out
        for record, loss, step in zip(records, losses, steps, strict=True):
            found = self._reference.train(record, rate=step.rate, row_squares=step.squares(record.labels.device))
            if step.is_left_out and found.is_left_out:
                left_out += 1
                continue
            if step.is_left_out != found.is_left_out:
                of_losses.append(math.inf)
                continue
            of_losses.append(_relative(abs(loss - found.loss), abs(found.loss)))
            for position, expected in found.gradients.items():
                own = record.gradients.get(position, torch.zeros_like(expected)) / found.scale * step.row_factor
                of_gradients.append(_difference(own, expected * found.row_factor))
        copies = {name: self._copies[id(p)].detach() for name, p in self._dense.parameters.items()}
        off = {name: _difference(weight, copies[name]) for name, weight in weights.items()}
        worst = max(off, key=lambda name: off[name])
        found_off, name = off[worst], worst if off[worst] else ""
        if before is not None and not found_off > before.weights:
            found_off, name = before.weights, before.worst
        self._reference.take_over(weights)
        return Verified(
            batches=self._num_compared + len(records),
            tolerance=tolerance(next(iter(weights.values())).dtype, self._dense.precision.autocast_dtype),
            loss=max(of_losses),
            gradients=max(of_gradients),
            weights=found_off,
            worst=name,
            left_out=left_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What the steps of a batch had, as JSON.

    Attributes:
        rate: learning rate.
        row_squares: squared norm of the rows' gradients; None: no limit asks for it.
        row_factor: by which the rows' gradients are multiplied.
        is_left_out: the batch changed nothing.
    """

    rate: float
    row_squares: float | None
    row_factor: float
    is_left_out: bool

    def squares(self, device: torch.device) -> Tensor | None:
        """The squared norm as a float64 scalar."""
        if self.row_squares is None:
            return None
        return torch.tensor(self.row_squares, dtype=torch.float64, device=device)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, relative to the largest element expected; inf where one is not a number."""
    if not expected.numel():
        return 0.0
    return _relative(float((found - expected).abs().max()), float(expected.abs().max()))


def _relative(difference: float, size: float) -> float:
    if not difference:
        return 0.0
    return difference / size if size and math.isfinite(difference) else math.inf
