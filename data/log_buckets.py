"""`LogBuckets`: numbers as ids of logarithmic buckets, for a number column that is read as a sparse feature.

    log-squared   x > 2: floor(ln(x)^2)      else: x without its fraction        the recipe of Criteo's benchmarks
    log           x >= 1: 1 + floor(log_base(x))      else: 0

A bucket begins at a fixed float64 number, found by an exact decimal computation. So an id does not depend on the
machine's logarithm.
"""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError

__all__ = ["RULES", "LogBuckets"]

RULES = ("log-squared", "log")

#: Numbers from here on fall into the last bucket: ids and integers are 64-bit.
_LARGEST = 2.0**63


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBuckets:
    """A rule from numbers to buckets.

    `log-squared` is what published preprocessing of Criteo does (``int(log(x) ** 2) if x > 2 else int(x)``): 1 and 3
    share bucket 1, and negative integers stay negative.

    Attributes:
        rule: one of `RULES`.
        base: of `log`, at least 1.01.

    Raises:
        InputError: another rule, or a base that is too small.
    """

    rule: str
    base: float = 2.0

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise InputError(f"buckets must be one of {', '.join(RULES)}, got {self.rule!r}")
        if not 1.01 <= self.base < _LARGEST:
            raise InputError(f"base must be at least 1.01, got {self.base}")

    def ids_of(self, numbers: NDArray[np.float64]) -> NDArray[np.int64]:
        """The bucket of each finite number, int64 ``[n]``."""
        if self.rule == "log":
            return np.searchsorted(_powers(self.base), numbers, side="right").astype(np.int64)
        buckets = np.searchsorted(_squared(), numbers, side="right") - 1
        small = np.trunc(np.clip(numbers, -_LARGEST, 2)).astype(np.int64)
        return np.where(numbers > 2, buckets, small)


@lru_cache(maxsize=16)
def _powers(base: float) -> NDArray[np.float64]:
    """base^0, base^1, … up to the largest."""
    found = []
    with decimal.localcontext(prec=50):
        power, factor = decimal.Decimal(1), decimal.Decimal(base)
        while power <= _LARGEST:
            found.append(float(power))
            power *= factor
    return np.array(found)


@lru_cache(maxsize=1)
def _squared() -> NDArray[np.float64]:
    """exp(sqrt(0)), exp(sqrt(1)), … up to the largest."""
    found: list[float] = []
    with decimal.localcontext(prec=50):
        while not found or found[-1] <= _LARGEST:
            found.append(float(decimal.Decimal(len(found)).sqrt().exp()))
    return np.array(found[:-1])
