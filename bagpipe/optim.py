"""Row optimizers: how the rows of embedding tables are updated, per table.

    SGD, Momentum, Adagrad, RowWiseAdagrad, Adam, AdamW, Ftrl, Frozen
        ──by table name, "*": the others──> `optimizers_of` ──> by table number

Each batch updates each of its rows once, with the gradient of the row summed over the whole global batch. The state of
an optimizer is kept in the record of the row. The formulas are those of torch and torchrec, operation by operation
(`bagpipe.kernels.row_optimizer`); state starts at zero.

    >>> from bagpipe.optim import SGD, Adagrad, Frozen, optimizers_of
    >>> warm_up = Adagrad(lr=lambda step: 0.02 * min(1.0, (step + 1) / 1000))
    >>> warm_up.rate(99)
    0.002
    >>> optimizers_of({"shop": Frozen(), "*": SGD(lr=0.1)}, ["user", "shop"])
    (SGD(lr=0.1, weight_decay=0.0, decoupled=True), Frozen())
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar, TypeAlias

from bagpipe.errors import InputError
from bagpipe.types.schema import DECAYED, FROZEN, L2_DECAYED

__all__ = [
    "LEAST_DIVISOR",
    "OTHERS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Frozen",
    "Ftrl",
    "Momentum",
    "Rate",
    "RowOptimizer",
    "RowOptimizers",
    "RowWiseAdagrad",
    "check_optimizers",
    "optimizers_of",
    "settings_of",
    "shared_optimizer",
]

#: A learning rate, or a function of the number of the batch, from 0. A pure function of that number gives a resumed job
#: the rates of one that was not interrupted. It is called when the forward of the batch begins, once for each group of
#: tables that are updated together; by every rank, and must give all of them the same number.
Rate: TypeAlias = float | Callable[[int], float]

#: Table that stands for all tables that are not named.
OTHERS = "*"

#: Least number that keeps a divisor from 0 where gradients or their squares are 0, so that no row becomes NaN. Smaller
#: ones are 0 in float32, or can be: a processor may take numbers that are not normal for 0.
LEAST_DIVISOR = 1.18e-38
_IS_LEAST = f"must be a finite number of at least {LEAST_DIVISOR:g}"


@dataclass(frozen=True)
class RowOptimizer:
    """Optimizer of the rows of a table. Base class; its subclasses are the optimizers there are."""

    #: Its rule: a key of `bagpipe.kernels.row_optimizer.ROW_OPTIMIZERS`, or `FROZEN`.
    name: ClassVar[str]

    def rate(self, step: int) -> float:
        """Learning rate of batch number `step`, from 0.

        Raises:
            InputError: it is not a finite number of at least 0.
        """
        return 0.0

    @property
    def record(self) -> str:
        """Key of `OPTIMIZER_STATE_WIDTH`: what a row's record keeps."""
        return self.name

    @property
    def epsilon(self) -> float:
        """Added to a root before the division by it; 0 where there is none."""
        return 0.0

    @property
    def numbers(self) -> Mapping[str, Any]:
        """The other numbers of its step, by their name in `bagpipe.kernels.interface.RowStep`."""
        return {}


@dataclass(frozen=True)
class _Rated(RowOptimizer):
    """An optimizer with a learning rate, and decay of all rows of the table at every batch.

    Decoupled: ``w *= 1 - lr * weight_decay``, then the step (`bagpipe.kernels.row_decay`); the product is below 1. L2:
    ``g += weight_decay * w``, with g = 0 for rows without a gradient, then the step (`bagpipe.kernels.row_l2`).
    """

    lr: Rate
    _: KW_ONLY
    weight_decay: float = 0.0
    decoupled: bool = True

    def __post_init__(self) -> None:
        if not callable(self.lr):
            self._check_rate(self.lr, "a finite number of at least 0, or a function of the step")
        if not (_is_number(self.weight_decay) and self.weight_decay >= 0):
            raise InputError(
                f"{type(self).__name__}: weight_decay must be a finite number of at least 0, got {self.weight_decay!r}"
            )

    @property
    def record(self) -> str:
        if not self.weight_decay:
            return self.name
        return f"{self.name}{L2_DECAYED if self._is_l2 else DECAYED}"

    @property
    def numbers(self) -> Mapping[str, Any]:
        if not self.weight_decay:
            return {}
        return {"weight_decay": self.weight_decay, **({"is_l2": True} if self._is_l2 else {})}

    @property
    def _is_l2(self) -> bool:
        return not self.decoupled and self.name != SGD.name  # for SGD both are the same

    def rate(self, step: int) -> float:
        if not callable(self.lr):
            return float(self.lr)
        return self._check_rate(self.lr(step), f"a finite number of at least 0 at step {step}")

    def _check_rate(self, lr: Any, expected: str) -> float:
        if _is_number(lr) and lr >= 0:
            return float(lr)
        raise InputError(f"{type(self).__name__}: lr must be {expected}, got {lr!r}")


@dataclass(frozen=True)
class _Adaptive(_Rated):
    """An optimizer that divides by a root."""

    _: KW_ONLY
    eps: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.eps) and self.eps >= LEAST_DIVISOR):
            raise InputError(
                f"{type(self).__name__}: eps {_IS_LEAST}, as a gradient of 0 would give 0 / 0, got {self.eps!r}"
            )

    @property
    def epsilon(self) -> float:
        return self.eps


@dataclass(frozen=True)
class SGD(_Rated):
    """`torch.optim.SGD` without momentum: ``w -= lr * g``. A row has no state.

    Args:
        lr: learning rate, a number or a function of the step.
        weight_decay: decay of all rows at every batch, keyword only; so of the other optimizers. A row that decays
            has one more number of state.
        decoupled: kind of the decay; False: L2. For this optimizer both are the same.

    Raises:
        InputError: `lr` is not a finite number of at least 0.
    """

    name: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Momentum(_Rated):
    """`torch.optim.SGD` with momentum on the rows of the batch only: ``u = momentum * u + g; w -= lr * u``.

    The velocity u of a row moves when a batch uses the row. `dim` numbers of state a row.

    Args:
        lr: learning rate, a number or a function of the step.
        momentum: factor of the velocity, keyword only.

    Raises:
        InputError: `lr` is not a finite number of at least 0, or `momentum` not one below 1.
    """

    name: ClassVar[str] = "momentum"
    _: KW_ONLY
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            raise InputError(f"Momentum: momentum must be a number from 0, below 1, got {self.momentum!r}")

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {**super().numbers, "momentum": self.momentum}


@dataclass(frozen=True)
class Adagrad(_Adaptive):
    """`torch.optim.Adagrad` without decay: ``s += g * g; w -= lr * g / (sqrt(s) + eps)``. `dim` numbers of state a row.

    Args:
        lr: learning rate, a number or a function of the step.
        eps: epsilon, keyword only; torch's default.

    Raises:
        InputError: `lr` is not a finite number of at least 0, or `eps` not one of at least `LEAST_DIVISOR`.
    """

    name: ClassVar[str] = "adagrad"
    _: KW_ONLY
    eps: float = 1e-10


@dataclass(frozen=True)
class RowWiseAdagrad(_Adaptive):
    """`torchrec.optim.RowWiseAdagrad`: ``s += mean(g * g); w -= lr * g / (sqrt(s) + eps)``. One number of state a row.

    Args:
        lr: learning rate, a number or a function of the step.
        eps: epsilon, keyword only. The default is that of FBGEMM's tables; torchrec's own module has 1e-10.

    Raises:
        InputError: `lr` is not a finite number of at least 0, or `eps` not one of at least `LEAST_DIVISOR`.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    _: KW_ONLY
    eps: float = 1e-8


@dataclass(frozen=True)
class Adam(_Adaptive):
    """`torch.optim.SparseAdam`: Adam on the rows of the batch only, betas 0.9 and 0.999. ``2 * dim`` numbers a row.

    ``m += (g - m) * (1 - 0.9); v += (g * g - v) * (1 - 0.999); w -= rate * m / (sqrt(v) + eps)``. The correction of the
    bias is in the rate: ``lr * sqrt(1 - 0.999 ** t) / (1 - 0.9 ** t)``, where t counts the batches from 1, with and
    without the row.

    Args:
        lr: learning rate, a number or a function of the step.
        eps: epsilon, keyword only; torch's default.

    Raises:
        InputError: `lr` is not a finite number of at least 0, or `eps` not one of at least `LEAST_DIVISOR`.
    """

    name: ClassVar[str] = "adam"
    _: KW_ONLY
    eps: float = 1e-8


@dataclass(frozen=True)
class AdamW(Adam):
    """`torch.optim.AdamW` on the rows of the batch only, while all rows decay at every batch: `Adam` with decay.

    Args:
        lr: learning rate, a number or a function of the step.
        eps: epsilon, keyword only; torch's default.
        weight_decay: keyword only; torch's default.

    Raises:
        InputError: as `Adam`.
    """

    _: KW_ONLY
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.decoupled:
            raise InputError("AdamW: its decay is decoupled, use Adam for decoupled=False")


@dataclass(frozen=True)
class Ftrl(RowOptimizer):
    """FTRL-Proximal of McMahan et al., "Ad Click Prediction", KDD 2013, algorithm 1. ``2 * dim`` numbers a row.

    ``s = (sqrt(n + g * g) - sqrt(n)) / lr; z += g - s * w; n += g * g``, then w is 0 where ``|z| <= l1``, elsewhere
    ``-(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)``. The first gradient of a row is that of its initial value,
    of which a beta above 0 keeps a part.

    Args:
        lr: alpha. A number: sums of the state are in its units, so a rate that changes would rescale the weights.
        beta: keyword only; the paper's choice.
        l1, l2: strength of the penalties, keyword only.

    Raises:
        InputError: `lr` is not a finite number of at least `LEAST_DIVISOR`, another not one of at least 0, or both
            `beta` and `l2` are below `LEAST_DIVISOR`.
    """

    name: ClassVar[str] = "ftrl"
    lr: float
    _: KW_ONLY
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        if not (_is_number(self.lr) and self.lr >= LEAST_DIVISOR):
            raise InputError(f"Ftrl: lr {_IS_LEAST}, which does not change, got {self.lr!r}")
        for name, value in self.numbers.items():
            if not (_is_number(value) and value >= 0):
                raise InputError(f"Ftrl: {name} must be a finite number of at least 0, got {value!r}")
        if max(self.beta, self.l2) < LEAST_DIVISOR:
            raise InputError(
                f"Ftrl: beta or l2 {_IS_LEAST}, as a small gradient is divided by them, got {self.beta!r}, {self.l2!r}"
            )

    def rate(self, step: int) -> float:
        return float(self.lr)

    @property
    def numbers(self) -> Mapping[str, Any]:
        return {"beta": self.beta, "l1": self.l1, "l2": self.l2}


@dataclass(frozen=True)
class Frozen(RowOptimizer):
    """Rows that are read and never updated, like a parameter with ``requires_grad=False``. A row has no state.

    No gradient is computed for them, and they are never written to the store. A row that the store lacks has its
    initial value, each time it is fetched.
    """

    name: ClassVar[str] = FROZEN


#: One optimizer for all tables, or one per table name; the name ``"*"`` stands for all tables that are not named.
RowOptimizers: TypeAlias = RowOptimizer | Mapping[str, RowOptimizer]


def check_optimizers(rows: RowOptimizers) -> None:
    """Check the type of every optimizer.

    Raises:
        InputError: something is not a `RowOptimizer`.
    """
    named = rows if isinstance(rows, Mapping) else {OTHERS: rows}
    for name, optimizer in named.items():
        if not isinstance(optimizer, RowOptimizer) or not hasattr(optimizer, "name"):
            raise InputError(
                f"row optimizer of table {name!r}: expected one of bagpipe.optim (SGD, Momentum, Adagrad, "
                f"RowWiseAdagrad, Adam, AdamW, Ftrl, Frozen), got {optimizer!r}"
            )


def optimizers_of(rows: RowOptimizers, table_names: Sequence[str]) -> tuple[RowOptimizer, ...]:
    """The optimizer of each table.

    Args:
        rows: one for all tables, or one per table name; ``"*"`` stands for all tables that are not named.
        table_names: names, by table number.

    Raises:
        InputError: a table has no optimizer, a name is not that of a table, or something is not a `RowOptimizer`.
    """
    check_optimizers(rows)
    if not isinstance(rows, Mapping):
        return (rows,) * len(table_names)
    unknown = [name for name in rows if name != OTHERS and name not in table_names]
    without = [name for name in table_names if name not in rows and OTHERS not in rows]
    if unknown or without:
        raise InputError(
            f'row optimizers: expected one for each of the tables {list(table_names)}, or "*" for those not named; '
            f"got {list(rows)}: unknown {unknown}, without an optimizer {without}"
        )
    return tuple(rows[name] if name in rows else rows[OTHERS] for name in table_names)


def shared_optimizer(optimizers: Sequence[RowOptimizer]) -> str:
    """Name for `RowSchema.optimizer`: that of most tables; the first of several. Frozen tables do not count.

    Tables that have another one name it (`RowTable.optimizer`).
    """
    counts = Counter(optimizer.record for optimizer in optimizers if optimizer.record != FROZEN)
    return counts.most_common(1)[0][0] if counts else SGD.name


def settings_of(optimizers: Sequence[RowOptimizer]) -> tuple[int, ...]:
    """Numbers that are equal exactly where the optimizers are, by table number; for `build_layout`."""
    different: list[RowOptimizer] = []
    for optimizer in optimizers:
        if optimizer not in different:
            different.append(optimizer)
    return tuple(different.index(optimizer) for optimizer in optimizers)


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)
