"""The record of a stored row: words of weights and of optimizer state, by number type and row optimizer.

RowType: words of the weights ──┐
OPTIMIZER_STATE_WIDTH ──────────┴──record_words──> words of ``[weights | optimizer state]``
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = [
    "DECAYED",
    "FROZEN",
    "L2_DECAYED",
    "OPTIMIZER_STATE_WIDTH",
    "ROW_TYPES",
    "STATE_WIDTH",
    "RowType",
    "base_optimizer",
    "moves_without_gradient",
]

#: Optimizer of a table whose rows are read and never updated. Only tables have it (`RowTable.optimizer`).
FROZEN = "frozen"

#: Ending of the names of row optimizers whose rows decay. Their last number of state is the step that the row is at.
DECAYED = "_decayed"
#: The same, for rows whose decay is a part of their gradient, and so of the optimizer's update.
L2_DECAYED = "_l2"

#: Optimizer-state elements stored beside the `dim` weights of one row, of optimizers without decay.
STATE_WIDTH: Mapping[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "momentum": lambda dim: dim,  # velocity, per element
    "adagrad": lambda dim: dim,  # sum of squared gradients, per element
    "rowwise_adagrad": lambda dim: 1,  # sum of mean squared gradients, per row
    "adam": lambda dim: 2 * dim,  # first and second moment, per element
    "ftrl": lambda dim: 2 * dim,  # z, and the sum of squared gradients, per element
    FROZEN: lambda dim: 0,
}


def _and_step(width: Callable[[int], int]) -> Callable[[int], int]:
    return lambda dim: width(dim) + 1


#: The same of all optimizers.
OPTIMIZER_STATE_WIDTH: Mapping[str, Callable[[int], int]] = {
    **STATE_WIDTH,
    **{
        f"{name}{ending}": _and_step(width)
        for ending in (DECAYED, L2_DECAYED)
        for name, width in STATE_WIDTH.items()
        if name != FROZEN
    },
}


def base_optimizer(name: str) -> tuple[str, bool]:
    """The optimizer without decay, and whether its rows decay."""
    base = name.removesuffix(DECAYED).removesuffix(L2_DECAYED)
    return base, base != name


def moves_without_gradient(name: str) -> bool:
    """Whether an update with gradient zero differs from none. With L2 decay, rows have one at every batch anyway."""
    return base_optimizer(name)[0] in ("momentum", "adam", "ftrl") and not name.endswith(L2_DECAYED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowType:
    """Number type of a row's weights. A record is a vector of *words* of this size.

    Attributes:
        word_bytes: bytes of a weight.
        word: numpy dtype of a word, little-endian. Half words are opaque bits to numpy, which has no bfloat16.
        compute: dtype of optimizer state, gradients and pooled vectors; narrower weights are widened for computation.
    """

    word_bytes: int
    word: str
    compute: str

    @property
    def is_half(self) -> bool:
        """Weights are narrower than the compute dtype."""
        return self.word_bytes == 2

    def weight_words(self, dim: int) -> int:
        """Words of `dim` weights in a record: an even number of halves, so that the state is aligned."""
        return dim + dim % 2 if self.is_half else dim

    def record_words(self, dim: int, optimizer: str) -> int:
        """Words of a record of `dim` weights: weights, then the state of `optimizer`."""
        state_words = 2 if self.is_half else 1
        return self.weight_words(dim) + OPTIMIZER_STATE_WIDTH[optimizer](dim) * state_words


#: By `RowSchema.dtype`.
ROW_TYPES: Mapping[str, RowType] = {
    "float32": RowType(word_bytes=4, word="<f4", compute="float32"),
    "float64": RowType(word_bytes=8, word="<f8", compute="float64"),
    "float16": RowType(word_bytes=2, word="<u2", compute="float32"),
    "bfloat16": RowType(word_bytes=2, word="<u2", compute="float32"),
}
