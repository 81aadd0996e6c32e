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

__all__ = ["SavedPlace", "SavedPlaces"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedPlace:
    """Where a tensor lies in the whole parameters of a unit; in elements."""

    shard: UnitShard
    shape: torch.Size
    strides: tuple[int, ...]
    first: int

    def get(self) -> Tensor:
        """The tensor, in the memory that the unit has now.

        Raises:
            InputError: whole parameters are not here.
        """
        if not self.shard.is_here:
            raise InputError(OUTSIDE)
        return self.shard.whole.as_strided(self.shape, self.strides, self.first)


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

    def place(self, tensor: Tensor) -> SavedPlace | None:
        """The place of a tensor that lies in whole parameters; None: it does not."""
        if tensor.layout is not torch.strided:
            return None
        shard = self._storages.get(tensor.untyped_storage()._cdata)
        if shard is None or tensor.dtype != shard.whole.dtype:
            return None
        first = int(tensor.storage_offset())
        return SavedPlace(shard=shard, shape=tensor.shape, strides=tensor.stride(), first=first)

    def _pack(self, tensor: Tensor) -> Tensor | SavedPlace:
        place = self.place(tensor)
        if place is not None:
            return place
        # Detached: an operator's own result would keep itself alive.
        return tensor if tensor.grad_fn is None else tensor.detach()


def _unpack(saved: Tensor | SavedPlace) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.get()
