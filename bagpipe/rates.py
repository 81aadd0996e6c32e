"""Learning-rate schedules: the factor of a learning rate as a pure function of the step, or of the epoch.

    step ──────────warm-up──> ramp ──┐
    step or epoch ──shape──> decay ──┴─ * ──> factor of the learning rate, from 0 to 1

The shapes and the warm-up are those of `torch.optim.lr_scheduler`. A factor depends on the position alone, so a job
that is killed and resumed has the rates of one that was not. `Plateau` depends on metrics; its state is a small record.

    >>> schedule = Schedule(shape=Cosine(length=8, floor=0.1), warmup_steps=4)
    >>> [round(schedule.factor(step), 3) for step in (0, 2, 4, 8, 12, 99)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
    >>> schedule.times(0.02)(4)  # a rate of `bagpipe.optim`
    0.02
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, Protocol

from bagpipe.errors import InputError

__all__ = [
    "Constant",
    "Cosine",
    "Exponential",
    "Plateau",
    "PlateauState",
    "Polynomial",
    "Schedule",
    "ScheduledRate",
    "Shape",
    "StepDecay",
]


class Shape(Protocol):
    """A factor by position: the number of steps after the warm-up, or of epochs, from 0."""

    def at(self, position: int) -> float:
        """The factor at a position of at least 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The factor 1."""

    def at(self, position: int) -> float:
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecay:
    """``factor ** n`` after n drops: torch's `StepLR` and `MultiStepLR`.

    Attributes:
        factor: of one drop.
        every: positions between two drops; 0: drops are at `milestones`.
        milestones: positions of drops, ascending; a position can occur more than once.
        floor: the factor is never less.
    """

    factor: float
    every: int = 0
    milestones: tuple[int, ...] = ()
    floor: float = 0.0

    def at(self, position: int) -> float:
        num_drops = position // self.every if self.every else bisect_right(self.milestones, position)
        return max(self.floor, math.pow(self.factor, num_drops))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponential:
    """``factor ** (position / every)``, without steps: torch's `ExponentialLR` for ``every = 1``.

    Attributes:
        factor: over `every` positions.
        every: at least 1.
        floor: the factor is never less.
    """

    factor: float
    every: int = 1
    floor: float = 0.0

    def at(self, position: int) -> float:
        return max(self.floor, math.pow(self.factor, position / self.every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosine:
    """Half a cosine from 1 to `floor`, which stays: torch's `CosineAnnealingLR` up to its ``T_max``.

    Attributes:
        length: positions from 1 to `floor`.
        floor: the last factor.
    """

    length: int
    floor: float = 0.0

    def at(self, position: int) -> float:
        if position >= self.length:
            return self.floor
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * position / self.length)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Polynomial:
    """``(1 - position / length) ** power`` from 1 to `floor`, which stays: torch's `PolynomialLR` for a floor of 0.

    Attributes:
        length: positions from 1 to `floor`.
        power: 1: a straight line.
        floor: the last factor.
    """

    length: int
    power: float = 1.0
    floor: float = 0.0

    def at(self, position: int) -> float:
        left = max(0.0, 1 - position / self.length)
        return self.floor + (1 - self.floor) * math.pow(left, self.power)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A shape behind a linear warm-up: torch's `SequentialLR` of `LinearLR` and the shape's scheduler.

    Attributes:
        shape: its positions are the steps after the warm-up or, `by_epoch`, the epochs from the start of the job.
        warmup_steps: steps over which the factor rises linearly; 0: none.
        warmup_start: factor of step 0, if there is a warm-up.
        by_epoch: the shape follows epochs. The warm-up multiplies it.
    """

    shape: Shape = Constant()
    warmup_steps: int = 0
    warmup_start: float = 0.0
    by_epoch: bool = False

    def factor(self, step: int, epoch: int = 0) -> float:
        """The factor of a batch.

        Args:
            step: number of the batch, from 0.
            epoch: complete passes over the data before it; used only `by_epoch`.
        """
        decay = self.shape.at(epoch if self.by_epoch else max(0, step - self.warmup_steps))
        if step >= self.warmup_steps:
            return decay
        return decay * (self.warmup_start + (1 - self.warmup_start) * (step / self.warmup_steps))

    def times(self, lr: float) -> ScheduledRate:
        """The learning rate as a function of the step.

        Raises:
            InputError: the schedule follows epochs.
        """
        if self.by_epoch:
            raise InputError(f"a function of the step needs a schedule by steps, got {self}")
        return ScheduledRate(lr=lr, schedule=self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRate:
    """A learning rate that follows a schedule, callable with the number of the batch: a `bagpipe.optim.Rate`."""

    lr: float
    schedule: Schedule

    def __call__(self, step: int) -> float:
        return self.lr * self.schedule.factor(step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlateauState:
    """The memory of `Plateau` between two metrics; `dataclasses.asdict` makes JSON of it for a checkpoint.

    Attributes:
        factor: the factor of the learning rate.
        best: best metric so far; None: there was none.
        num_bad: metrics in a row that were no improvement.
        num_cooling: metrics still left out after a drop.
    """

    factor: float = 1.0
    best: float | None = None
    num_bad: int = 0
    num_cooling: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """Drops the factor when a metric stops improving: torch's `ReduceLROnPlateau`, whose ``eps`` is 0 here.

    A metric that is not a number is no improvement.

    Attributes:
        drop: the factor is multiplied by it.
        patience: metrics without improvement that are tolerated in a row.
        threshold: least improvement that counts.
        threshold_mode: whether `threshold` is a share of the best metric, or a difference to it.
        cooldown: metrics after a drop that are not counted as bad.
        floor: the factor is never less.
        larger_is_better: such as an AUC; otherwise such as a loss.
    """

    drop: float = 0.1
    patience: int = 10
    threshold: float = 1e-4
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = 0
    floor: float = 0.0
    larger_is_better: bool = False

    def update(self, state: PlateauState, metric: float) -> PlateauState:
        """The state after one more metric."""
        is_better = self._is_better(metric, state.best)
        best = float(metric) if is_better else state.best
        num_bad = 0 if is_better or state.num_cooling else state.num_bad + 1
        if num_bad > self.patience:
            factor = max(self.floor, state.factor * self.drop)
            return PlateauState(factor=factor, best=best, num_bad=0, num_cooling=self.cooldown)
        return dataclasses.replace(state, best=best, num_bad=num_bad, num_cooling=max(0, state.num_cooling - 1))

    def factor(self, state: PlateauState) -> float:
        """The factor of the learning rate."""
        return state.factor

    def _is_better(self, metric: float, best: float | None) -> bool:
        if best is None:
            return not math.isnan(metric)
        sign = 1 if self.larger_is_better else -1
        bound = best * (1 + sign * self.threshold) if self.threshold_mode == "rel" else best + sign * self.threshold
        return metric > bound if self.larger_is_better else metric < bound
