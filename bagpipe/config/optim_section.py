"""`OptimConfig`: the keys of optimizers and learning rates, a section of `bagpipe.config.sections`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from bagpipe.config.ranges import ABOVE_0, ASCENDING, BELOW_1, DIVISOR, FROM_0_TO_1, at_least
from bagpipe.types.schema import FROZEN

__all__ = [
    "ROW_CHOICES",
    "ClipScope",
    "DenseOptimizer",
    "OptimConfig",
    "RateShape",
    "RateUnit",
    "RowChoice",
    "pairs",
]

DenseOptimizer = Literal["sgd", "adagrad", "adam", "adamw", "lamb"]
RateShape = Literal["constant", "step", "exponential", "cosine", "polynomial", "plateau"]
ClipScope = Literal["dense", "rows", "all"]
RateUnit = Literal["step", "epoch"]
RowChoice = Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "ftrl"]

#: Row optimizers that a table can have.
ROW_CHOICES: tuple[str, ...] = (*get_args(RowChoice), FROZEN)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizers.

    Attributes:
        rows: row optimizer.
        rows_lr: its learning rate; of ftrl: its alpha.
        rows_by_table: row optimizers of single tables, TABLE=OPTIMIZER; frozen: the rows of the table do not change.
        rows_lr_by_table: learning rates of the rows of single tables, TABLE=RATE.
        rows_weight_decay: decay of all rows at every step, used or not; not of ftrl.
        rows_decay_kind: decoupled: the weight is multiplied by 1 - rate * decay; l2: decay * weight is added to the
            gradient.
        rows_momentum: of the row optimizer momentum.
        ftrl_beta: of the row optimizer ftrl; 0 needs an L2 penalty.
        ftrl_l1: strength of its L1 penalty.
        ftrl_l2: strength of its L2 penalty.
        dense: dense optimizer.
        dense_lr: its learning rate.
        eps: epsilon of both (torch's and FBGEMM's defaults differ, so it is always explicit).
        momentum: of the dense optimizer sgd.
        nesterov: Nesterov's momentum.
        beta1: decay of the mean gradient of the dense optimizers adam, adamw and lamb.
        beta2: decay of their mean squared gradient.
        weight_decay: of the dense optimizer; sgd, adagrad, adam: added to the gradient (L2); adamw, lamb: decoupled.
        weight_decay_exempt: dense parameters without decay: patterns of their names such as ``*.bias``; 1d: those with
            at most one dimension, biases and the weights of norms.
        schedule: factor of the dense learning rate, after the warm-up: constant; step (drops, by schedule_factor);
            exponential (the same without steps); cosine or polynomial, over schedule_length, to schedule_floor;
            plateau (a drop by schedule_factor when eval.metric has stopped improving).
        schedule_unit: whether the schedule counts steps after the warm-up, or epochs.
        schedule_length: of cosine and polynomial, in units.
        schedule_every: units between two drops of step; units in which exponential falls by schedule_factor.
        schedule_milestones: units at which step drops, in place of schedule_every.
        schedule_factor: of one drop.
        schedule_power: of polynomial; 1: a straight line.
        schedule_floor: last factor of cosine and polynomial, least factor of step, exponential and plateau.
        schedule_patience: evaluations in a row without improvement that plateau tolerates.
        schedule_threshold: share of the best value by which an evaluation must be better to count, of plateau.
        schedule_cooldown: evaluations after a drop that plateau does not count.
        warmup_steps: steps over which the learning rate rises linearly, before the schedule; 0: none.
        warmup_start: factor of the learning rate at the first of them.
        rows_schedule: schedule of the rows' learning rate: same (and the same warm-up), or one of its own with the
            numbers of schedule_* and rows_warmup_steps.
        rows_warmup_steps: warmup_steps of a schedule of its own.
        clip_norm: largest 2-norm of the gradients in clip_scope, of the global batch; 0: no limit.
        clip_scope: gradients whose norm is limited: of dense parameters (dense), of rows (rows), or all together (all).
        clip_value: largest magnitude of an element of a dense gradient; 0: no limit.
        precondition: none, or kfac: second-order steps: gradients of the dense part's linear layers are preconditioned.
        kfac_factors: of kfac: summed, from the examples of all ranks, or local, from those of the rank that owns the
            layer (DP-KFAC): less traffic, results depend on the number of ranks.
        kfac_decay: of kfac: weight of the factors before in their running averages.
        kfac_damping: of kfac: added to the factors by the trace rule before they are inverted.
        kfac_kappa: of kfac: largest size of a step, learning rate squared times preconditioned gradient times gradient;
            0: no limit.
        kfac_factor_every: of kfac: batches between two updates of the factors.
        kfac_inverse_every: of kfac: batches between two updates of the inverses.
        kfac_lag: of kfac: 0: inverses of the batch itself; 1: of the batch before, made while a pipeline idles.
        kfac_placement: of kfac with stages: its work goes into bubbles of the pipeline, or last, behind the backwards.
        ema_decay: decay of an exponential moving average of the dense weights, kept in checkpoints; 0: none.
        ema_evaluate: evaluate with the averaged weights; needs ema_decay.
    """

    rows: RowChoice = "adagrad"
    rows_lr: Annotated[float, ABOVE_0] = 0.02
    rows_by_table: tuple[str, ...] = ()  # the values of both are rules
    rows_lr_by_table: tuple[str, ...] = ()
    rows_weight_decay: Annotated[float, at_least(0)] = 0.0
    rows_decay_kind: Literal["decoupled", "l2"] = "decoupled"
    rows_momentum: Annotated[float, BELOW_1] = 0.9
    ftrl_beta: Annotated[float, at_least(0)] = 1.0  # that of McMahan et al., KDD 2013
    ftrl_l1: Annotated[float, at_least(0)] = 0.0
    ftrl_l2: Annotated[float, at_least(0)] = 0.0
    dense: DenseOptimizer = "adagrad"
    dense_lr: Annotated[float, ABOVE_0] = 0.02
    eps: Annotated[float, DIVISOR] = 1e-8
    momentum: Annotated[float, BELOW_1] = 0.0
    nesterov: bool = False
    beta1: Annotated[float, BELOW_1] = 0.9  # torch's Adam
    beta2: Annotated[float, BELOW_1] = 0.999
    weight_decay: Annotated[float, at_least(0)] = 0.0
    weight_decay_exempt: tuple[str, ...] = ()
    schedule: RateShape = "constant"
    schedule_unit: RateUnit = "step"
    schedule_length: Annotated[int, at_least(0)] = 0
    schedule_every: Annotated[int, at_least(0)] = 0
    schedule_milestones: Annotated[tuple[int, ...], ASCENDING] = ()
    schedule_factor: Annotated[float, FROM_0_TO_1] = 0.1  # torch's StepLR
    schedule_power: Annotated[float, ABOVE_0] = 1.0
    schedule_floor: Annotated[float, FROM_0_TO_1] = 0.0
    schedule_patience: Annotated[int, at_least(0)] = 10  # this and the next two: torch's ReduceLROnPlateau
    schedule_threshold: Annotated[float, BELOW_1] = 1e-4
    schedule_cooldown: Annotated[int, at_least(0)] = 0
    warmup_steps: Annotated[int, at_least(0)] = 0
    warmup_start: Annotated[float, FROM_0_TO_1] = 0.0
    rows_schedule: Literal["same"] | RateShape = "same"
    rows_warmup_steps: Annotated[int, at_least(0)] = 0
    clip_norm: Annotated[float, at_least(0)] = 0.0
    clip_scope: ClipScope = "dense"
    clip_value: Annotated[float, at_least(0)] = 0.0
    precondition: Literal["none", "kfac"] = "none"
    kfac_factors: Literal["summed", "local"] = "summed"
    kfac_decay: Annotated[float, BELOW_1] = 0.95  # this and the next two: those of DP-KFAC's authors
    kfac_damping: Annotated[float, at_least(0)] = 0.003
    kfac_kappa: Annotated[float, at_least(0)] = 0.001
    kfac_factor_every: Annotated[int, at_least(1)] = 1
    kfac_inverse_every: Annotated[int, at_least(1)] = 10
    kfac_lag: Annotated[int, FROM_0_TO_1] = 0
    kfac_placement: Literal["bubbles", "last"] = "bubbles"
    ema_decay: Annotated[float, BELOW_1] = 0.0
    ema_evaluate: bool = False

    @property
    def row_optimizers(self) -> frozenset[str]:
        """The row optimizers of all tables."""
        return frozenset((self.rows, *(name for _, name in pairs(self.rows_by_table))))

    @property
    def row_shape(self) -> RateShape:
        """Shape of the rows' schedule."""
        return self.schedule if self.rows_schedule == "same" else self.rows_schedule


def pairs(items: tuple[str, ...]) -> list[tuple[str, str]]:
    """``TABLE=VALUE`` items as pairs; the value of an item without a sign is empty."""
    return [(item.partition("=")[0].strip(), item.partition("=")[2].strip()) for item in items]
