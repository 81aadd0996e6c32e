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

__all__ = ["hash_ids", "mix64", "place_ids", "range_reason", "scramble40"]

_NONE = np.zeros(0, np.int64)

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


def place_ids(
    ids: NDArray[np.int64], table: Table, present: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of a table's rows, folded if the table hashes, and the ascending positions of those outside its range.

    Args:
        ids: int64 ``[n]``.
        table: their table.
        present: bool ``[n]``, the ids that there are; None: all.
    """
    if table.rows is None:
        return ids, _NONE
    if table.hash:
        return hash_ids(np.ascontiguousarray(ids), table.rows), _NONE
    some = ids if present is None else ids[present]
    if not some.size or (int(some.min()) >= 0 and int(some.max()) < table.rows):
        return ids, _NONE
    outside = (ids < 0) | (ids >= table.rows)
    return ids, np.flatnonzero(outside if present is None else outside & present)


def range_reason(table: Table, raw_id: int) -> str:
    """The fault of an id outside the range of its table. Unsigned ids of 2^63 and more are negative ones here."""
    unsigned = f" ({raw_id % 2**64} as an unsigned number)" if raw_id < 0 else ""
    return f"expected ids of table {table.name!r} in [0, {table.rows}), got {raw_id}{unsigned}"
