"""Ids of any integer type as int64, by one rule: `as_int64` of a tensor, `given_ids` of what a caller names.

An id is 64 bits. Unsigned ids of 2^63 and more are the negative ones of the same bits, as in the data readers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError

__all__ = ["as_int64", "given_ids"]


def as_int64(ids: Tensor, what: str) -> Tensor:
    """The ids as int64, on their device; the tensor itself if it is int64.

    Args:
        ids: of any shape.
        what: they are, for the error.

    Raises:
        InputError: they are no integers.
    """
    if ids.dtype is torch.int64:
        return ids
    if ids.dtype is torch.uint64:
        return ids.view(torch.int64)
    if ids.is_floating_point() or ids.is_complex() or ids.is_quantized or ids.dtype is torch.bool:
        raise InputError(f"{what} must be integers, got {ids.dtype}")
    return ids.to(torch.int64)


def given_ids(ids: Tensor | NDArray[np.integer[Any]] | Sequence[int], what: str) -> Tensor:
    """int64 ``[n]`` on the host: ids from a tensor, an array or integers of Python.

    Args:
        ids: ``[n]``.
        what: they are, for the error.

    Raises:
        InputError: they are no integers of 64 bits, signed or unsigned, or not one dimension.
    """
    try:
        given = torch.as_tensor(ids)
    except (ValueError, OverflowError) as error:  # Python's integers can be larger than torch's
        if isinstance(ids, Sequence) and all(isinstance(each, int) and -(1 << 63) <= each < 1 << 64 for each in ids):
            words = [each & ((1 << 64) - 1) for each in ids]
            return torch.from_numpy(np.array(words, np.uint64).view(np.int64))
        raise InputError(f"{what} must be one dimension of integers of 64 bits, got {ids!r:.100}") from error
    given = given.detach().cpu()
    if given.dim() != 1:
        raise InputError(f"{what} must be one dimension of integers, got {given.dtype} {list(given.shape)}")
    if not len(given):  # of an empty list: float32
        return given.new_empty(0, dtype=torch.int64)
    return as_int64(given, what)
