"""Rounding of float32 weights to a half dtype: to nearest, or stochastic.

    (seed, table name) ──blake2b──> key ──+ id + mix 64 (step)──> row key ──+ column──> 32 bits ─┐ top k bits
    float32 weight ──its last k bits: what the half type has no room for───────────────────────> + ──carry──> rounds up

Rule of this file: *the random bits are a pure function of (seed, table, id, column, step)*, so results do not depend on
slots, cache size, lanes, ranks or a resume. A weight between two neighbours of the half dtype rounds up with a
probability equal to its relative distance from the lower one; a representable weight stays. Rounding is symmetric in
the sign.

Special values follow torch's conversion: NaN stays NaN, and infinity is the neighbour of the largest finite number.
Weights do not saturate there, so that a table that leaves the range of float16 shows in the loss.

    bfloat16   drops 16 bits. Its exponent range is that of float32, so the carry covers all cases, subnormals too.
    float16    drops 13 bits from 2**-14 on. Below, its numbers are multiples of 2**-24: the weight is scaled to these
               units, exactly, and 24 bits of the fraction decide (the rest of a weight is below 2**-48).

Source: stochastic rounding of Gupta et al. 2015 ("Deep learning with limited numerical precision").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels.initialization import TORCH_DTYPE, random_words, step_key, table_key
from bagpipe.kernels.interface import RowNames
from bagpipe.types.schema import RowSchema

__all__ = ["Rounding", "StochasticRounding", "open_rounding", "round_stochastic"]

_SIGN = -(1 << 31)
_MAGNITUDE = (1 << 31) - 1
_SMALLEST_NORMAL = 2.0**-14  # of float16
_UNIT_EXPONENT = 24  # float16's subnormals are multiples of 2**-24
_FRACTION_BITS = 24


class Rounding(Protocol):
    """Rounding of updated weights.

    Attributes:
        needs_names: `write` needs the names of the rows.
    """

    needs_names: bool

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        """Round `weights` into `out`.

        Args:
            weights: float32 ``[n, dim]``; can be overwritten.
            out: ``[n, dim]`` in a half dtype, any strides.
            names: names of the rows, ``[n]`` each, if `needs_names`.
            step: number of batches trained, this one included.

        Raises:
            JobError: needed names are missing.
        """
        ...


class _NearestRounding:
    """Round to nearest, ties to even: torch's conversion, on every device."""

    needs_names = False

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        out.copy_(weights)


class StochasticRounding:
    """Stochastic rounding, which keeps the mean. See `Rounding`.

    Args:
        schema: seed and table names.
        device: device of the rows.
    """

    needs_names = True

    def __init__(self, schema: RowSchema, device: torch.device) -> None:
        keys = [table_key(schema.seed, table.name, purpose="rounding") for table in schema.tables]
        self.table_keys = torch.tensor(keys, dtype=torch.int64, device=device)

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        if names is None:
            raise JobError("stochastic rounding needs the names of the rows, got none")
        keys = self.table_keys.index_select(0, names.tables).add_(step_key(step))
        words = random_words(names.ids, keys, weights.shape[1])
        out.copy_(round_stochastic(weights, words, out.dtype))


def open_rounding(schema: RowSchema, device: torch.device) -> Rounding:
    """The rounding of the half-precision rows of a schema."""
    return StochasticRounding(schema, device) if schema.rounding == "stochastic" else _NearestRounding()


def round_stochastic(weights: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round each weight to its lower or upper neighbour in a half dtype.

    Args:
        weights: float32, any shape.
        words: int32 of the same shape, 32 random bits each.
        dtype: float16 or bfloat16.

    Returns:
        float32 values that `dtype` represents exactly (65536, above the largest float16, becomes infinity).
    """
    return _ROUND[dtype](weights, words)


def _round_bfloat16(weights: Tensor, words: Tensor) -> Tensor:
    return torch.where(weights.isnan(), weights, _carried(weights, words, dropped_bits=16))


def _round_float16(weights: Tensor, words: Tensor) -> Tensor:
    whole = _carried(weights, words, dropped_bits=13)
    small = weights.abs() < _SMALLEST_NORMAL
    rounded = torch.where(small, _in_units(weights, words), whole)
    return torch.where(weights.isnan(), weights, rounded)


def _carried(weights: Tensor, words: Tensor, *, dropped_bits: int) -> Tensor:
    """Add random bits below the last kept bit. A carry rounds up, if necessary into the next exponent."""
    bits = weights.contiguous().view(torch.int32)
    below = (1 << dropped_bits) - 1
    drawn = (words >> (32 - dropped_bits)) & below  # mask off the sign bits of the arithmetic shift
    # Only NaN is above infinity, and infinity has no dropped bits, so the sum does not reach the sign bit.
    magnitude = ((bits & _MAGNITUDE) + drawn) & ~below
    return (magnitude | (bits & _SIGN)).view(torch.float32)


def _in_units(weights: Tensor, words: Tensor) -> Tensor:
    """Round to multiples of 2**-24. All steps but the carry are exact: power-of-two scaling and splitting."""
    units = weights.abs().mul_(2.0**_UNIT_EXPONENT)
    whole = units.floor()
    fraction = units.sub_(whole).mul_(2.0**_FRACTION_BITS).to(torch.int32)
    drawn = (words >> (32 - _FRACTION_BITS)) & ((1 << _FRACTION_BITS) - 1)
    carry = (fraction + drawn) >> _FRACTION_BITS
    return whole.add_(carry).mul_(2.0**-_UNIT_EXPONENT).copysign_(weights)


_ROUND: Mapping[torch.dtype, Callable[[Tensor, Tensor], Tensor]] = {
    TORCH_DTYPE["bfloat16"]: _round_bfloat16,
    TORCH_DTYPE["float16"]: _round_float16,
}
