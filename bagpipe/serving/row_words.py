"""Number types of served rows: half types, which numpy lacks in part, and rows of 8 bits.

float16, bfloat16   words of 16 bits ──widen──> float32, exactly        float32 ──narrow, ties to even──> words
int8                x[i] = code[i] * scale + offset, code 0 to 255, scale and offset for each row
                    error at most scale / 2, and float32's rounding; a row of equal weights is exact
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import InputError

__all__ = ["CodedRows", "code_rows", "narrow", "widen"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedRows:
    """Rows of 8 bits a weight, and 8 bytes beside them.

    Attributes:
        codes: uint8 ``[n, dim]``.
        scale, offset: float32 ``[n]``.
    """

    codes: NDArray[np.uint8]
    scale: NDArray[np.float32]
    offset: NDArray[np.float32]

    def decoded(self) -> NDArray[np.float32]:
        """float32 ``[n, dim]``."""
        values = self.codes.astype(np.float32)
        values *= self.scale[:, None]
        values += self.offset[:, None]
        return values


def code_rows(values: NDArray[Any]) -> CodedRows:
    """Rows ``[n, dim]`` of floating-point weights with 8 bits a weight.

    Raises:
        InputError: a weight is not finite.
    """
    if not np.isfinite(values).all():
        raise InputError("rows of 8 bits need finite weights, got an infinite one or none")
    wide = values.astype(np.float64)
    low, high = wide.min(1, initial=np.inf), wide.max(1, initial=-np.inf)
    if not values.shape[1]:
        low = high = np.zeros(len(values))
    offset, scale = low.astype(np.float32), ((high - low) / 255).astype(np.float32)
    # The codes fit the rounded scale and offset, which are those that a reader has.
    steps = np.where(scale > 0, scale, np.float32(1)).astype(np.float64)
    codes = np.rint((wide - offset.astype(np.float64)[:, None]) / steps[:, None]).clip(0, 255).astype(np.uint8)
    return CodedRows(codes=codes, scale=scale, offset=offset)


def narrow(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Weights in the compute dtype as words of a row dtype (`ROW_TYPES`), rounded to nearest, ties to even."""
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        words: NDArray[Any] = rounded.astype(np.uint16)
        # A NaN whose payload is in the lower bits would become infinite, or overflow.
        words[np.isnan(values)] = np.uint16(0x7FC0)
        return words
    return values.astype(dtype, copy=False)


def widen(words: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Words of a row dtype as weights in the compute dtype: float64 for float64, else float32."""
    if dtype == "float16":
        return words.view(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.astype(dtype, copy=False)
