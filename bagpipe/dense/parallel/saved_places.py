"""`SavedPlaces`: what autograd saves of whole parameters, as places: their memory can go and come back elsewhere.

forward    saves weight.t() ──> place: unit, shape, strides, first element
backward   place ──> a view of the memory that the unit has now
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bagpipe.dense.parallel.closed_parameter import OUTSIDE
from bagpipe.dense.parallel.unit_shard import UnitShard
from bagpipe.errors import InputError

__all__ = ["SavedPlaces"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where a tensor lies in the whole parameters of a unit; in elements."""

    shard: UnitShard
    shape: torch.Size
    strides: tuple[int, ...]
    first: int


class SavedPlaces:
    """Units whose whole parameters come and go. Lanes may save while another lane gathers other units."""

    def __init__(self) -> None:
        self._storages: dict[int, UnitShard] = {}  # of whole parameters that are here, by address

    def arrive(self, shard: UnitShard) -> None:
        """The whole parameters of a unit are gathered; see `UnitShard.arrive`."""
        if shard.arrive():
            self._storages[shard.whole.untyped_storage()._cdata] = shard

    def release(self, shard: UnitShard) -> None:
        """Let go of the whole parameters of a unit, if they are here."""
        if shard.is_here:
            self._storages.pop(shard.whole.untyped_storage()._cdata, None)
            shard.release()

    def saving(self) -> AbstractContextManager[Any]:
        """Around computations whose graphs outlive the memory of the parameters.

        Raises:
            InputError: in the backward: whole parameters are not here.
        """
        return saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Place:
        if tensor.layout is torch.strided:
            shard = self._storages.get(tensor.untyped_storage()._cdata)
            if shard is not None and tensor.dtype == shard.whole.dtype:
                first = int(tensor.storage_offset())
                return _Place(shard=shard, shape=tensor.shape, strides=tensor.stride(), first=first)
        # Detached: an operator's own result would keep itself alive.
        return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(saved: Tensor | _Place) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    if not saved.shard.is_here:
        raise InputError(OUTSIDE)
    return saved.shard.whole.as_strided(saved.shape, saved.strides, saved.first)
