"""A bounded Zipf distribution of any vocabulary, sampled by inverse transform without a table of the vocabulary.

Rank 0 has probability `head`, because logs have a default value far above any power law. The other ranks k = 1, 2, …
follow Zipf and Mandelbrot, density proportional to ``(k + shift) ** -exponent``, in the continuous form, whose
distribution function can be inverted: with a = 1 - exponent, lo = 1 + shift, hi = vocabulary + shift,

    F(x) = (x**a - lo**a) / (hi**a - lo**a)    x = (lo**a + u * (hi**a - lo**a)) ** (1/a)    a = 0: x = lo * (hi/lo)**u

and rank k takes the density between k and k + 1. float64 separates ranks up to a vocabulary of 2**40.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError

__all__ = ["MAX_VOCABULARY", "ZipfLaw"]

MAX_VOCABULARY = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipfLaw:
    """A distribution over ranks ``[0, vocabulary)``, most popular first.

    Attributes:
        vocabulary: number of ranks, 1 to 2**40.
        exponent: decay of popularity; 0 is uniform.
        shift: number of top ranks that are flattened, at least 0.
        head: probability of rank 0 in [0, 1); 0: rank 0 is never drawn and rank 1 is the most popular.
    """

    vocabulary: int
    exponent: float = 1.05
    shift: float = 0.0
    head: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.vocabulary <= MAX_VOCABULARY:
            raise InputError(f"vocabulary must be between 1 and 2**40, got {self.vocabulary}")
        if not 0 <= self.exponent <= 10:
            raise InputError(f"exponent must be between 0 and 10, got {self.exponent}")
        if self.shift < 0:
            raise InputError(f"shift must be at least 0, got {self.shift}")
        if not 0 <= self.head < 1:
            raise InputError(f"head must be at least 0 and below 1, got {self.head}")

    def ranks(self, uniforms: NDArray[np.float64]) -> NDArray[np.int64]:
        """int64 ranks of numbers in ``[0, 1)``: a monotone function, so equal numbers give equal ranks."""
        if self.vocabulary == 1:
            return np.zeros(uniforms.shape, np.int64)
        share = np.maximum(uniforms - self.head, 0.0) / (1.0 - self.head)
        low, high = 1.0 + self.shift, self.vocabulary + self.shift
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:
            position = low * (high / low) ** share
        else:
            # Relative to `low`, so that no power overflows or underflows at steep exponents. The last ranks of a steep
            # law have less than one rounding error of probability, so the sum can round to 0, past the end of the law.
            end = (high / low) ** power
            base = 1.0 + share * (end - 1.0)
            position = low * np.maximum(base, min(end, 1.0)) ** (1.0 / power)
        ranks = np.clip((position - self.shift).astype(np.int64), 1, self.vocabulary - 1)
        ranks[uniforms < self.head] = 0
        return ranks
