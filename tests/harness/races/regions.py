"""`cells_of`: the storage cells of a tensor, or of some of its rows."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.harness.races.shadow import CELL_BYTES, Cells

__all__ = ["cells_of"]


def cells_of(tensor: Tensor, rows: Tensor | None = None) -> Cells:
    """Cells in ascending order; some can be repeated.

    Args:
        tensor: strided, not empty.
        rows: indices of its rows, int ``[n]``; None: all of it.
    """
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if rows is None or not tensor.dim():
        if tensor.is_contiguous():
            return slice(first // CELL_BYTES, -(-(first + tensor.numel() * size) // CELL_BYTES))
        return _cells(_spread(tuple(tensor.shape), tuple(tensor.stride())) * size + first, size)
    inner = _spread(tuple(tensor.shape[1:]), tuple(tensor.stride()[1:]))
    numbers = rows.detach().numpy().astype(np.int64).reshape(-1, 1) * int(tensor.stride(0))
    return _cells((numbers + inner).reshape(-1) * size + first, size)


def _cells(starts: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Cells of elements of `size` bytes at these byte offsets."""
    parts = np.arange(-(-size // CELL_BYTES), dtype=np.int64)
    return (starts[:, None] // CELL_BYTES + parts).reshape(-1)


@lru_cache(maxsize=1024)
def _spread(shape: tuple[int, ...], stride: tuple[int, ...]) -> NDArray[np.int64]:
    """int64 ``[n]``: offset of every element from the first, in elements."""
    offsets = np.zeros(1, dtype=np.int64)
    for length, step in zip(shape, stride, strict=True):
        offsets = (offsets[:, None] + np.arange(length, dtype=np.int64) * step).reshape(-1)
    return offsets
