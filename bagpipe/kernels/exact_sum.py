"""Exact sums of numbers: they depend neither on the order of the terms nor on which rank has which of them.

    float64 ``[n]`` ──limbs_of──> int64 ``[NUM_LIMBS]``, added to those of other tensors and ranks ──total──> float64

A finite number of at least 0 is ``m * 2**p``, m and p integers. A *limb* k counts in units of ``2**(32 k - 1126)``: m,
shifted by p, is divided among three limbs of 32 bits. Sums of integers are exact, so equal sets of terms have equal
limbs. Only `total` rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NUM_LIMBS", "limbs_of", "squared_norms", "total"]

_LIMB_BITS = 32
_LIMB_MASK = (1 << _LIMB_BITS) - 1
_MANTISSA_BITS = 53
#: The least exponent of `torch.frexp` for a float64 is -1073: the exponent p of an integer mantissa is 53 less.
_LEAST_POWER = -1073 - _MANTISSA_BITS
#: The largest is 1024; a mantissa reaches into the two limbs above the one that it begins in.
_NUM_VALUE_LIMBS = (1024 - _MANTISSA_BITS - _LEAST_POWER) // _LIMB_BITS + 3
#: The last one counts the terms that are not finite.
NUM_LIMBS = _NUM_VALUE_LIMBS + 1


def limbs_of(values: Tensor) -> Tensor:
    """The exact sum of numbers, as limbs.

    Args:
        values: float64 ``[n]``, at least 0; n below 2**30, so that no limb overflows.

    Returns:
        int64 ``[NUM_LIMBS]``. Limbs of several tensors may be added, up to 2**30 terms in all.
    """
    is_finite = torch.isfinite(values)
    fraction, exponent = torch.frexp(torch.where(is_finite, values, 0.0))
    mantissa = torch.ldexp(fraction, fraction.new_tensor(_MANTISSA_BITS)).long()
    position = (exponent.long() - (_MANTISSA_BITS + _LEAST_POWER)).clamp_(min=0)  # the exponent of 0 is any
    first, shift = position >> 5, position & (_LIMB_BITS - 1)
    low = (mantissa & _LIMB_MASK) << shift
    high = (mantissa >> _LIMB_BITS) << shift
    limbs = torch.zeros(NUM_LIMBS, dtype=torch.int64, device=values.device)
    limbs.index_add_(0, first, low & _LIMB_MASK)
    limbs.index_add_(0, first + 1, (low >> _LIMB_BITS) + (high & _LIMB_MASK))
    limbs.index_add_(0, first + 2, high >> _LIMB_BITS)
    limbs[-1] = (~is_finite).sum()
    return limbs


def total(limbs: Tensor) -> Tensor:
    """The sum, float64 scalar, within a few units in the last place; NaN if a term is not finite.

    Args:
        limbs: int64 ``[NUM_LIMBS]``.
    """
    powers = torch.arange(_NUM_VALUE_LIMBS, dtype=torch.float64, device=limbs.device) * _LIMB_BITS + _LEAST_POWER
    units = torch.exp2(powers)  # of the two least limbs: 0, below the range of float64
    value = (limbs[:-1].double() * units).sum()
    return torch.where(limbs[-1] > 0, torch.nan, value)


def squared_norms(vectors: Tensor) -> Tensor:
    """float64 ``[n]``: squared 2-norms of vectors ``[n, dim]``, dim above 0; each depends on its own vector alone.

    Elementwise operations only: those along a dimension may add in an order that depends on the other one.
    """
    terms = vectors.t().to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    terms *= terms
    width = terms.shape[0]
    while width > 1:
        half = width // 2
        if width % 2:
            terms[0] += terms[width - 1]
        terms[:half] += terms[half : 2 * half]
        width = half
    return terms[0]
