"""From float32 to a half type and how: to the nearest, or up or down at odds that keep the mean.

    (seed, table name) ──blake2b──> key ──+ id + mix 64 (step)──> row key ──+ column──> 32 bits ─┐ top k bits
    float32 weight ──its last k bits: what the half type has no room for───────────────────────> + ──carry──> rounds up

Rule of this file: *the bits drawn are a pure function of (seed, table, id, column, step)*, so a result does not depend
on slots, cache size, lanes, ranks or a resume. A weight between two neighbours of the half type becomes the upper one
with a probability equal to its place between them; one that the half type has stays. Signs do not matter: a weight
and its negative round alike.

Both types keep what torch's own conversion does with the rest: NaN stays NaN, and beyond the largest finite number
lies infinity, which is a neighbour like any other. Nothing is cut off at the largest number: a table whose weights
leave the range of float16 shall be seen in the loss.

bfloat16   16 bits have no room. Its exponents are float32's, so the carry does everything, subnormals included.
float16    13 bits have no room from 2**-14 on. Below, its numbers are multiples of 2**-24: the weight is counted in
           those, exactly, and 24 bits of the fraction decide (smaller parts of a weight are below 2**-48).

The place of a carry follows Gupta et al. 2015 ("Deep learning with limited numerical precision"), stochastic rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from bagpipe.errors import JobError
from bagpipe.kernels.initialization import TORCH_DTYPE, mixed_step, row_words, table_key
from bagpipe.kernels.interface import RowNames
from bagpipe.types.schema import RowSchema

__all__ = ["NearestRounding", "Rounding", "StochasticRounding", "open_rounding", "round_stochastic"]

_SIGN = -(1 << 31)
_MAGNITUDE = (1 << 31) - 1
_SMALLEST_NORMAL = 2.0**-14  # of float16
_UNIT_EXPONENT = 24  # float16's subnormals are multiples of 2**-24
_FRACTION_BITS = 24


class Rounding(Protocol):
    """How updated weights become rows again.

    Attributes:
        needs_names: `write` wants names.
    """

    needs_names: bool

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        """Round `weights` into `out`.

        Args:
            weights: float32 ``[n, dim]``; may be overwritten.
            out: ``[n, dim]`` in a half type, any strides.
            names: the rows' names, ``[n]`` each, where they are needed.
            step: batches trained so far, this one included.

        Raises:
            JobError: names are needed, and there are none.
        """
        ...


class NearestRounding:
    """To the nearest, ties to even: torch's own conversion, on every device."""

    needs_names = False

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        out.copy_(weights)


class StochasticRounding:
    """Up or down, at odds that keep the mean. See `Rounding`.

    Args:
        schema: seed and table names.
        device: of the rows.
    """

    needs_names = True

    def __init__(self, schema: RowSchema, device: torch.device) -> None:
        keys = [table_key(schema.seed, table.name, purpose="rounding") for table in schema.tables]
        self.table_keys = torch.tensor(keys, dtype=torch.int64, device=device)

    def write(self, weights: Tensor, out: Tensor, names: RowNames | None, step: int) -> None:
        if names is None:
            raise JobError("rows are rounded stochastically, and nobody said which rows they are")
        keys = self.table_keys.index_select(0, names.tables).add_(mixed_step(step))
        words = row_words(names.ids, keys, weights.shape[1])
        out.copy_(round_stochastic(weights, words, out.dtype))


def open_rounding(schema: RowSchema, device: torch.device) -> Rounding:
    """The rounding of a schema of half rows."""
    return StochasticRounding(schema, device) if schema.rounding == "stochastic" else NearestRounding()


def round_stochastic(weights: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of a half type, as float32: each weight's lower neighbour, or its upper one.

    Args:
        weights: float32, any shape.
        words: int32, of the same shape: 32 random bits each.
        dtype: float16 or bfloat16.

    Returns:
        float32; converting it to `dtype` rounds nothing any more (65536, next to the largest, is float16's infinity).
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
    """Add random bits below the last bit that is kept: a carry rounds up, also into the next exponent."""
    bits = weights.contiguous().view(torch.int32)
    below = (1 << dropped_bits) - 1
    drawn = (words >> (32 - dropped_bits)) & below  # the shift is arithmetic: the copied sign bits are masked off
    # No weight but NaN is above infinity, and infinity has no bits to drop: the sum does not reach the sign.
    magnitude = ((bits & _MAGNITUDE) + drawn) & ~below
    return (magnitude | (bits & _SIGN)).view(torch.float32)


def _in_units(weights: Tensor, words: Tensor) -> Tensor:
    """Multiples of 2**-24. All steps but the carry are exact: they scale by powers of two, or split a number."""
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
