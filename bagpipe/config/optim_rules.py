"""Checks of the `optim` keys that depend on each other, for `bagpipe.config.rules`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping

from bagpipe.config.optim_section import ROW_CHOICES, OptimConfig, pairs
from bagpipe.config.sections import Config
from bagpipe.optim import LEAST_DIVISOR
from bagpipe.types.schema import FROZEN

__all__ = ["CHANGEABLE", "OPTIM_PROBLEMS"]

#: Keys that decide which state an optimizer or an average has: a checkpoint has that of the values it was made with.
_KEYS_OF_STATE = frozenset(
    {"rows", "rows_by_table", "rows_decay_kind", "dense", "precondition", "kfac_lag", "ema_decay", "ema_evaluate"}
)
#: Keys of results that a resume may change, if `checkpoint.change` names them.
CHANGEABLE = (
    *(f"optim.{item.name}" for item in dataclasses.fields(OptimConfig) if item.name not in _KEYS_OF_STATE),
    *(
        f"model.{name}"
        for name in ("loss", "loss_weights", "label_smoothing", "pos_weight", "focal_gamma", "focal_alpha")
    ),
)

#: Key -> the shapes of schedules that use it.
_SHAPE_USERS: Mapping[str, tuple[str, ...]] = {
    "schedule_length": ("cosine", "polynomial"),
    "schedule_every": ("step", "exponential"),
    "schedule_milestones": ("step",),
    "schedule_factor": ("step", "exponential", "plateau"),
    "schedule_power": ("polynomial",),
    "schedule_floor": ("step", "exponential", "cosine", "polynomial", "plateau"),
    "schedule_patience": ("plateau",),
    "schedule_threshold": ("plateau",),
    "schedule_cooldown": ("plateau",),
    "schedule_unit": ("step", "exponential", "cosine", "polynomial"),
}
#: Key -> the row optimizer that uses it.
_ROW_USERS: Mapping[str, str] = {
    "rows_momentum": "momentum",
    "ftrl_l1": "ftrl",
    "ftrl_l2": "ftrl",
}
#: Key -> the dense optimizers that use it.
_DENSE_USERS: Mapping[str, tuple[str, ...]] = {
    "momentum": ("sgd",),
    "beta1": ("adam", "adamw", "lamb"),
    "beta2": ("adam", "adamw", "lamb"),
}


def _shape_problem(config: Config, shape: str) -> str | None:
    """The unmet need of a shape, as the end of the message; None: there is none."""
    optim = config.optim
    if shape == "plateau" and not config.eval.every:
        return "plateau needs eval.every, the steps or epochs between evaluations, got 0"
    if shape in _SHAPE_USERS["schedule_length"] and not optim.schedule_length:
        return f"{shape} needs optim.schedule_length, the steps or epochs to its end, got 0"
    if shape == "exponential" and not optim.schedule_every:
        return "exponential needs optim.schedule_every above 0, got 0"
    if shape == "step" and bool(optim.schedule_every) == bool(optim.schedule_milestones):
        got = "both" if optim.schedule_every else "neither"
        return f"step needs optim.schedule_every or optim.schedule_milestones, got {got}"
    return None


def _schedule_problem(config: Config) -> str | None:
    return _shape_problem(config, config.optim.schedule)


def _rows_schedule_problem(config: Config) -> str | None:
    return _shape_problem(config, config.optim.row_shape)


def _unused_problem(
    name: str, choice: str, users: Collection[str], chosen: Callable[[OptimConfig], Collection[str]]
) -> Callable[[Config], str | None]:
    """The problem of a key that only some values of another key use.

    Args:
        name: of the key.
        choice: name of the other key.
        users: its values that use the key.
        chosen: the values that a configuration has.
    """

    def problem(config: Config) -> str | None:
        value = getattr(config.optim, name)
        if value == getattr(OptimConfig, name) or not set(users).isdisjoint(chosen(config.optim)):
            return None
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        shown = f"{shown:g}" if isinstance(shown, float) else shown
        return f"{shown} needs optim.{choice} {' or '.join(users)}, got {getattr(config.optim, choice)}"

    return problem


def _warmup_start_problem(config: Config) -> str | None:
    optim = config.optim
    if not optim.warmup_start or optim.warmup_steps or optim.rows_warmup_steps:
        return None
    return f"{optim.warmup_start:g} needs optim.warmup_steps above 0, got 0"


def _rows_warmup_problem(config: Config) -> str | None:
    optim = config.optim
    if not optim.rows_warmup_steps or optim.rows_schedule != "same":
        return None
    return f"{optim.rows_warmup_steps} needs optim.rows_schedule, a schedule of the rows' own, got same"


def _twice(tables: list[str]) -> str | None:
    twice = [name for name in tables if tables.count(name) > 1]
    return f"names table {twice[0]!r} more than once" if twice else None


def _rows_by_table_problem(config: Config) -> str | None:
    items = config.optim.rows_by_table
    for item, (table, name) in zip(items, pairs(items), strict=True):
        if not table or name not in ROW_CHOICES:
            return f"must be TABLE=OPTIMIZER, the optimizer one of {', '.join(ROW_CHOICES)}, got {item!r}"
    return _twice([table for table, _ in pairs(items)])


def _rows_lr_by_table_problem(config: Config) -> str | None:
    items = config.optim.rows_lr_by_table
    frozen = {table for table, name in pairs(config.optim.rows_by_table) if name == FROZEN}
    for item, (table, rate) in zip(items, pairs(items), strict=True):
        if not table or not _is_rate(rate):
            return f"must be TABLE=RATE, the rate a finite number above 0, got {item!r}"
        if table in frozen:
            return f"gives a rate to table {table!r}, which optim.rows_by_table freezes"
    return _twice([table for table, _ in pairs(items)])


def _is_rate(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _ftrl_problem(config: Config) -> str | None:
    optim = config.optim
    warmup = optim.warmup_steps if optim.rows_schedule == "same" else optim.rows_warmup_steps
    if "ftrl" not in optim.row_optimizers or (optim.row_shape == "constant" and not warmup):
        return None
    return (
        f"ftrl needs a rate of rows that does not change, its state is in units of it: optim.rows_schedule constant "
        f"without a warm-up, got {optim.row_shape} and {warmup} steps of warm-up"
    )


def _ftrl_beta_problem(config: Config) -> str | None:
    unused = _unused_problem("ftrl_beta", "rows", ("ftrl",), lambda optim: optim.row_optimizers)(config)
    if unused or "ftrl" not in config.optim.row_optimizers:
        return unused
    beta, l2 = config.optim.ftrl_beta, config.optim.ftrl_l2
    if max(beta, l2) >= LEAST_DIVISOR:
        return None
    return f"{beta:g} needs optim.ftrl_l2 above 0, as a small gradient would be divided by 0, got {l2:g}"


def _row_decay_problem(config: Config) -> str | None:
    optim = config.optim
    if not optim.rows_weight_decay:
        return "0 with optim.rows_decay_kind l2, expected more than 0" if optim.rows_decay_kind == "l2" else None
    if optim.rows_decay_kind == "l2" and "adamw" in optim.row_optimizers:
        return f"{optim.rows_weight_decay:g} of adamw is decoupled: use adam for optim.rows_decay_kind l2"
    if optim.rows_decay_kind == "l2" and (config.run.device != "cpu" or config.run.kernels == "triton"):
        return f"{optim.rows_weight_decay:g} with optim.rows_decay_kind l2 needs run.device cpu and torch's kernels"
    shown = f"{optim.rows_weight_decay:g}"
    if "ftrl" in optim.row_optimizers:
        return f"{shown} is not possible with ftrl, whose next step would undo it: use optim.ftrl_l2"
    if config.pipeline.rows_delay:
        return f"{shown} is not possible with pipeline.rows_delay 1: a lookup precedes the decay of the batch before it"
    dtype = config.run.dtype if config.cache.dtype == "run" else config.cache.dtype
    if dtype not in ("float32", "float64"):
        return f"{shown} needs rows of float32 or float64, got cache.dtype {dtype}"
    return None


def _average_problem(config: Config) -> str | None:
    if not config.optim.ema_evaluate or config.optim.ema_decay:
        return None
    return "needs optim.ema_decay above 0, got 0"


def _exempt_problem(config: Config) -> str | None:
    items = config.optim.weight_decay_exempt
    if not items or config.optim.weight_decay:
        return None
    return f"{','.join(items)} needs optim.weight_decay above 0, got 0"


def _nesterov_problem(config: Config) -> str | None:
    return "needs optim.momentum above 0, got 0" if config.optim.nesterov and not config.optim.momentum else None


def _clip_scope_problem(config: Config) -> str | None:
    optim = config.optim
    if optim.clip_scope == "dense" or optim.clip_norm:
        return None
    return f"{optim.clip_scope} needs optim.clip_norm above 0, got 0"


def _clip_value_problem(config: Config) -> str | None:
    optim = config.optim
    if not optim.clip_value or not optim.clip_norm:
        return None
    return f"{optim.clip_value:g} needs optim.clip_norm 0, got {optim.clip_norm:g}"


def _precondition_problem(config: Config) -> str | None:
    optim, run, dense = config.optim, config.run, config.dense
    if optim.precondition == "none":
        return None
    if run.compile or run.cuda_graph:
        name, layers = ("compile", "compiled layers") if run.compile else ("cuda_graph", "layers of a captured graph")
        return f"kfac is not possible with run.{name}: {layers} do not show their inputs"
    if dense.is_chunked and run.device != "cpu":
        return (
            f"kfac is not possible with dense.budget_bytes or dense.state host on run.device {run.device}: torch has "
            f"gradients where their parameters are, which are on the host meanwhile"
        )
    if optim.clip_value or (optim.clip_norm and optim.clip_scope != "rows"):
        text = f"clip_norm 0, or of rows alone, got {optim.clip_norm:g}"
        if optim.clip_value:
            text = f"clip_value 0, got {optim.clip_value:g}"
        return f"kfac limits steps by optim.kfac_kappa: expected optim.{text}"
    return None


def _kfac_lag_problem(config: Config) -> str | None:
    optim = config.optim
    if not optim.kfac_lag or optim.precondition != "kfac" or config.pipeline.is_staged:
        return None
    return "1 needs a pipeline.schedule, in whose bubbles inversions go, got none"


def _is_kfac(name: str) -> bool:
    return name.startswith("kfac_")


def _kfac_problem(name: str) -> Callable[[Config], str | None]:
    unused = _unused_problem(name, "precondition", ("kfac",), lambda optim: (optim.precondition,))
    return lambda config: unused(config) or (_kfac_lag_problem(config) if name == "kfac_lag" else None)


#: Key that a message begins with -> the rest of the message, or None if the configuration is consistent.
OPTIM_PROBLEMS: Mapping[str, Callable[[Config], str | None]] = {
    "optim.rows_by_table": _rows_by_table_problem,
    "optim.rows_lr_by_table": _rows_lr_by_table_problem,
    "optim.rows_weight_decay": _row_decay_problem,
    **{
        f"optim.{name}": _unused_problem(name, "rows", (user,), lambda optim: optim.row_optimizers)
        for name, user in _ROW_USERS.items()
    },
    "optim.ftrl_beta": _ftrl_beta_problem,
    "optim.rows": _ftrl_problem,
    "optim.schedule": _schedule_problem,
    "optim.rows_schedule": _rows_schedule_problem,
    **{
        f"optim.{name}": _unused_problem(name, "schedule", users, lambda optim: (optim.schedule, optim.row_shape))
        for name, users in _SHAPE_USERS.items()
    },
    "optim.warmup_start": _warmup_start_problem,
    "optim.rows_warmup_steps": _rows_warmup_problem,
    **{
        f"optim.{name}": _unused_problem(name, "dense", users, lambda optim: (optim.dense,))
        for name, users in _DENSE_USERS.items()
    },
    "optim.nesterov": _nesterov_problem,
    "optim.weight_decay_exempt": _exempt_problem,
    "optim.clip_scope": _clip_scope_problem,
    "optim.clip_value": _clip_value_problem,
    "optim.precondition": _precondition_problem,
    **{
        f"optim.{item.name}": _kfac_problem(item.name)
        for item in dataclasses.fields(OptimConfig)
        if _is_kfac(item.name)
    },
    "optim.ema_evaluate": _average_problem,
}
