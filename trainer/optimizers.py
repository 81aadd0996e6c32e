"""Dense optimizers by name, parameters that they do not decay, limits of gradients, and schedules of learning rates.

Row optimizers are in `bagpipe.config.row_optimizers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from bagpipe.config.optim_section import OptimConfig
from bagpipe.dense.clip import Clip
from bagpipe.dense.lamb import Lamb
from bagpipe.errors import InputError
from bagpipe.rates import Constant, Cosine, Exponential, Plateau, Polynomial, Schedule, Shape, StepDecay

__all__ = [
    "DENSE_OPTIMIZERS",
    "RATE_SHAPES",
    "clip_of",
    "dense_optimizer",
    "plateau_rule",
    "rate_schedule",
    "rows_rate_schedule",
    "undecayed_parameters",
]

#: Parameters, or groups of them with settings of their own: the argument of torch's optimizers.
Groups: TypeAlias = list[nn.Parameter] | list[dict[str, Any]]

DENSE_OPTIMIZERS: Mapping[str, Callable[[Groups, OptimConfig], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, config: torch.optim.SGD(
        parameters,
        lr=config.dense_lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
    ),
    "adagrad": lambda parameters, config: torch.optim.Adagrad(
        parameters, lr=config.dense_lr, eps=config.eps, weight_decay=config.weight_decay
    ),
    "adam": lambda parameters, config: torch.optim.Adam(parameters, **_adam_settings(config)),
    "adamw": lambda parameters, config: torch.optim.AdamW(parameters, **_adam_settings(config)),
    "lamb": lambda parameters, config: Lamb(parameters, **_adam_settings(config)),
}


def _adam_settings(config: OptimConfig) -> dict[str, Any]:
    return {
        "lr": config.dense_lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def dense_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimConfig, undecayed: Set[nn.Parameter] = frozenset()
) -> torch.optim.Optimizer:
    """The dense optimizer named by the configuration.

    Args:
        parameters: to be stepped.
        config: names it.
        undecayed: parameters without weight decay, in a group behind the others; not all have to be among `parameters`.
    """
    if config.dense not in DENSE_OPTIMIZERS:
        raise InputError(f"optim.dense must be one of {', '.join(DENSE_OPTIMIZERS)}, got {config.dense!r}")
    own = list(parameters)
    groups: Groups = own
    exempt = [parameter for parameter in own if parameter in undecayed]
    if exempt:
        decayed = [parameter for parameter in own if parameter not in undecayed]
        with_decay: list[dict[str, Any]] = [{"params": decayed}] if decayed else []
        groups = [*with_decay, {"params": exempt, "weight_decay": 0.0}]
    return DENSE_OPTIMIZERS[config.dense](groups, config)


def undecayed_parameters(
    named: Iterable[tuple[str, nn.Parameter]], patterns: Collection[str]
) -> frozenset[nn.Parameter]:
    """The parameters that `optim.weight_decay_exempt` names.

    Args:
        named: all dense parameters of the model.
        patterns: values of the key.

    Raises:
        InputError: a pattern fits no parameter.
    """
    parameters = dict(named)
    found: set[nn.Parameter] = set()
    for pattern in patterns:
        if pattern == "1d":
            fitting = {parameter for parameter in parameters.values() if parameter.dim() < 2}
        else:
            fitting = {parameter for name, parameter in parameters.items() if fnmatchcase(name, pattern)}
        if not fitting:
            raise InputError(
                f"optim.weight_decay_exempt: {pattern!r} fits no dense parameter; there are {', '.join(parameters)}"
            )
        found |= fitting
    return frozenset(found)


def clip_of(config: OptimConfig) -> Clip:
    """Limits of gradients."""
    return Clip(norm=config.clip_norm, value=config.clip_value, scope=config.clip_scope)


#: The shapes that are functions of the position; plateau is another one.
RATE_SHAPES: Mapping[str, Callable[[OptimConfig], Shape]] = {
    "constant": lambda config: Constant(),
    "step": lambda config: StepDecay(
        factor=config.schedule_factor,
        every=config.schedule_every,
        milestones=config.schedule_milestones,
        floor=config.schedule_floor,
    ),
    "exponential": lambda config: Exponential(
        factor=config.schedule_factor, every=config.schedule_every, floor=config.schedule_floor
    ),
    "cosine": lambda config: Cosine(length=config.schedule_length, floor=config.schedule_floor),
    "polynomial": lambda config: Polynomial(
        length=config.schedule_length, power=config.schedule_power, floor=config.schedule_floor
    ),
}


def plateau_rule(config: OptimConfig, *, larger_is_better: bool) -> Plateau | None:
    """The rule of the schedule plateau; None: no rate follows it."""
    if "plateau" not in (config.schedule, config.row_shape):
        return None
    return Plateau(
        drop=config.schedule_factor,
        patience=config.schedule_patience,
        threshold=config.schedule_threshold,
        cooldown=config.schedule_cooldown,
        floor=config.schedule_floor,
        larger_is_better=larger_is_better,
    )


def rate_schedule(config: OptimConfig, plateau: Shape | None = None) -> Schedule:
    """Schedule of the dense learning rate.

    Args:
        config: names the shape.
        plateau: the shape of that name.
    """
    return _schedule(config, config.schedule, config.warmup_steps, plateau)


def rows_rate_schedule(config: OptimConfig, plateau: Shape | None = None) -> Schedule:
    """Schedule of the rows' learning rate; see `rate_schedule`."""
    is_same = config.rows_schedule == "same"
    return _schedule(config, config.row_shape, config.warmup_steps if is_same else config.rows_warmup_steps, plateau)


def _schedule(config: OptimConfig, shape: str, warmup_steps: int, plateau: Shape | None) -> Schedule:
    return Schedule(
        shape=plateau if plateau is not None and shape == "plateau" else RATE_SHAPES[shape](config),
        warmup_steps=warmup_steps,
        warmup_start=config.warmup_start,
        by_epoch=config.schedule_unit == "epoch",
    )
