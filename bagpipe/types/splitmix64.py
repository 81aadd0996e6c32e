"""The finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable PRNGs", 2014), on arrays.

    (table, id) ──+ multiple of GOLDEN──> mix ──> bucket in the store, cell of the oracle's hash table
    id, or any word ──+ GOLDEN──> mix ──> id of a hashed table

Stored rows and the ids of hashed tables depend on these functions: a changed constant orphans every stored row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GOLDEN", "hash_ids", "mix", "mix_rows"]

#: 2**64 / golden ratio: the increment of splitmix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser, a bijection that maps 0 to 0. Changes `words`, uint64 ``[n]``, and returns them."""
    words ^= words >> np.uint64(30)
    words *= _MIX_1
    words ^= words >> np.uint64(27)
    words *= _MIX_2
    words ^= words >> np.uint64(31)
    return words


def mix_rows(tables: NDArray[np.integer[Any]], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A word of each row, uint64 ``[n]``, made from table number and id.

    Each table adds its own multiple of the golden ratio, so equal ids of two tables get unrelated words.

    Args:
        tables: table numbers from 0, integers, ``[n]`` or broadcastable to it.
        ids: int64 ``[n]``, any value and byte order.
    """
    own_byte_order = ids.astype(np.int64, copy=False)
    return mix(own_byte_order.view(np.uint64) + (tables.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def hash_ids(ids: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """``mix(id as unsigned + GOLDEN) % rows``, int64 in ``[0, rows)``: the bucket of each id of a hashed table."""
    return (mix(ids.view(np.uint64) + GOLDEN) % np.uint64(rows)).view(np.int64)
