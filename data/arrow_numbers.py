"""Texts in Arrow columns: split at a separator, and read as integers or numbers, with the positions of those that fail.

"3|17|x" ──split_texts──> ["3", "17", "x"] ──as_ids──> [3, 17, 0] and the position 2
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from data.string_hash import as_binary

__all__ = ["as_ids", "as_numbers", "split_texts"]

_INTEGER = r"^-?[0-9]{1,18}$"
_LONG_INTEGER = r"^-?[0-9]{19}$"
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"


def split_texts(texts: pa.Array, separator: str) -> pa.Array:
    """Texts as lists of binary. An empty text is an empty list, an empty part a null."""
    texts = as_binary(texts)
    empty = pc.equal(texts, b"")
    if pc.any(empty).as_py():
        texts = pc.if_else(empty, pa.scalar(None, pa.binary()), texts)
    lists = pc.split_pattern(texts, separator)
    parts = lists.flatten()
    empty = pc.equal(parts, b"")
    if not pc.any(empty).as_py():
        return lists
    parts = pc.if_else(empty, pa.scalar(None, pa.binary()), parts)
    bounds = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False), out=bounds[1:])
    return pa.ListArray.from_arrays(pa.array(bounds), parts)


def as_ids(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Decimal integers of 64 bits, int64 ``[n]``, and the ascending positions of the texts that are none (0 there)."""
    texts = as_binary(texts)
    good = pc.match_substring_regex(texts, _INTEGER)
    ids = pc.if_else(good, texts, b"0").cast(pa.string()).cast(pa.int64()).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(~good.to_numpy(zero_copy_only=False))
    if not wrong.size:
        return ids, wrong
    ids = ids.copy()
    is_long = pc.match_substring_regex(texts.take(pa.array(wrong)), _LONG_INTEGER).to_numpy(zero_copy_only=False)
    long = wrong[is_long]
    numbers = texts.take(pa.array(long)).cast(pa.string()).cast(pa.decimal128(19, 0)).cast(pa.decimal128(20, 0))
    fits = pc.and_(pc.less_equal(numbers, 2**63 - 1), pc.greater_equal(numbers, -(2**63)))
    fits = fits.to_numpy(zero_copy_only=False)
    ids[long[fits]] = numbers.filter(pa.array(fits)).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return ids, np.setdiff1d(wrong, long[fits], assume_unique=True)


def as_numbers(texts: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """Decimal numbers, a float32 array, and the ascending positions of the texts that are none (0 there)."""
    texts = as_binary(texts).fill_null(b"")
    good = pc.match_substring_regex(texts, _NUMBER)
    numbers = pc.if_else(good, texts, b"0").cast(pa.string()).cast(pa.float32())
    return numbers, np.flatnonzero(~good.to_numpy(zero_copy_only=False))
