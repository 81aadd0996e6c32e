"""Two fixed bijections of integers, and the range check of ids.

    raw 64-bit id ──mix64──> uniformly distributed 64-bit word ──modulo rows──> bucket of a hashed table
    popularity rank ──scramble40──> 40-bit id of a synthetic table

Both bijections are part of the data format: changing one changes which row an id means.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.types.schema import Table
from bagpipe.types.splitmix64 import GOLDEN, hash_ids, mix

__all__ = ["first_out_of_range", "hash_ids", "mix64", "scramble40"]

_MASK_40 = np.uint64((1 << 40) - 1)
_ODD_1 = np.uint64(0x9E3779B97F | 1)
_ODD_2 = np.uint64(0xD6E8FEB866 | 1)


def mix64(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea, Flood 2014), uint64 ``[n]``: add the golden gamma, then mix."""
    return mix(words + GOLDEN)


def scramble40(ranks: NDArray[np.int64], salt: int) -> NDArray[np.int64]:
    """A bijection of ``[0, 2**40)`` chosen by `salt`: collision-free ids that look like the hashes of real logs.

    Addition, multiplication by an odd number and a right xor-shift are each invertible modulo 2**40.
    """
    offset = np.uint64(int(mix64(np.array([salt], np.uint64))[0]) & ((1 << 40) - 1))
    words = (ranks.view(np.uint64) + offset) & _MASK_40
    words = (words * _ODD_1) & _MASK_40
    words ^= words >> np.uint64(20)
    words = (words * _ODD_2) & _MASK_40
    words ^= words >> np.uint64(23)
    return words.view(np.int64)


def first_out_of_range(ids: NDArray[np.int64], table: Table) -> int | None:
    """Position of the first id outside ``[0, rows)`` of a bounded table without hashing; None if there is none."""
    if table.rows is None or table.hash or not ids.size:
        return None
    if int(ids.min()) >= 0 and int(ids.max()) < table.rows:
        return None
    return int(np.flatnonzero((ids < 0) | (ids >= table.rows))[0])
