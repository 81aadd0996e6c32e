"""`distinct_ids`: the distinct row ids of several arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["distinct_ids"]


def distinct_ids(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The ids, ascending, each once; a new array.

    As `numpy.unique`, which hashes integers first and takes several times as long.

    Args:
        parts: at least one array ``[n]``, each of any length.
    """
    ids = np.concatenate(parts)
    ids.sort()
    is_first = np.ones(len(ids), dtype=np.bool_)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    return ids[is_first]
