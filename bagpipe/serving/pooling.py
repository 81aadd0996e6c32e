"""`Bags`, `pool`: vectors of ids to one vector for each example, as a model's collections do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError

__all__ = ["Bags", "pool"]

_MODES = {"sum": 0, "mean": 1}  # torch.embedding_bag's own numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """The ids of one feature.

    Attributes:
        ids: int64 ``[num_ids]``, example after example.
        lengths: integers ``[n]``, ids of each example; 0: an empty bag, whose vector is zero.
        weights: float32 ``[num_ids]`` of a weighted feature; None: ones.
    """

    ids: NDArray[np.int64]
    lengths: NDArray[np.integer[Any]]
    weights: NDArray[Any] | None = None

    @classmethod
    def of(cls, name: str, value: Bags | NDArray[np.int64]) -> Bags:
        """Checked bags of feature `name`; an int64 array has one id for each example.

        Raises:
            InputError: wrong dtypes or lengths.
        """
        bags = value if isinstance(value, Bags) else cls(ids=value, lengths=np.ones(len(value), np.int64))
        lengths = np.asarray(bags.lengths)
        if bags.ids.dtype != np.int64 or bags.ids.ndim != 1:
            raise InputError(f"feature {name!r}: ids must be int64 [n], got {bags.ids.dtype} {list(bags.ids.shape)}")
        if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 0) or int(lengths.sum()) != len(bags.ids):
            raise InputError(f"feature {name!r}: lengths must add up to its {len(bags.ids)} ids")
        if bags.weights is not None and bags.weights.shape != bags.ids.shape:
            raise InputError(f"feature {name!r}: {len(bags.ids)} ids need as many weights, got {len(bags.weights)}")
        return bags


def pool(vectors: Tensor, bags: Bags, pooling: str, *, weighted: bool = False) -> Tensor:
    """``[n, dim]``: the vectors of each example summed or averaged, in the order of its ids.

    It is the operation of training and evaluation on a CPU, so its sums have the same bits.

    Args:
        vectors: ``[num_ids, dim]``, of each id.
        bags: lengths and weights.
        pooling: ``sum`` or ``mean``.
        weighted: multiply each vector by its weight first; sum only.
    """
    weights = None
    if weighted:
        ones = np.ones(len(bags.ids), np.float32)
        weights = torch.tensor(ones if bags.weights is None else bags.weights).to(vectors.dtype)
    offsets = torch.zeros(len(bags.lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(np.asarray(bags.lengths, np.int64)), 0, out=offsets[1:])
    indices = torch.arange(len(vectors))
    return torch.embedding_bag(
        vectors, indices, offsets, False, _MODES[pooling], False, weights, include_last_offset=True
    )[0]
