"""`PrivateMemory`: users' batches in memory that costs no open files, of which a process may have few.

    batch of a worker process ──tensors in shared memory, and what refers to them, are copied──> held without open files

The processes of a `DataLoader` hand tensors over in shared memory; a mapped file of numpy is alike. Each costs a file
descriptor as long as it is held. A window of such batches has more than a process may have, and fills the machine's
shared memory. Copies take as much private memory, and the originals are free once the loader has dropped them.

Rules of this file:

* *The user's own objects do not change.* Containers and objects are copied as `copy.copy` does, and only those from
  which a copied tensor can be reached. A batch with one that cannot be copied so is held as it came.
* *What many batches refer to is not copied*, such as the data that they are cut from: memory that an earlier batch had,
  large tensors, and those of a model.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ReferenceType, WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from bagpipe.train_pipeline.batch_graph import IMMUTABLE, SEQUENCES, Kind, Leaves

__all__ = ["PrivateMemory", "is_shared"]

#: Bytes of a tensor or array that is copied, at most: a window of larger ones needs more memory than there is.
_MAX_BYTES = 1 << 28
#: Searches through all containers of a batch for those that are copied.
_MAX_SWEEPS = 100
#: Layout -> methods that give the tensors which one of it consists of.
_PARTS: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    torch.jagged: ("values", "offsets"),
}


class PrivateMemory:
    """Gives one batch after the other, of one or several loaders."""

    def __init__(self) -> None:
        self._seen: set[StorageWeakRef] = set()
        self._num_alive = 0  # at the last count
        self._maps: WeakSet[mmap.mmap] = WeakSet()
        self._latest: list[Tensor] = []  # held: the same memory, sent again by a worker, is then the same storage

    def of(self, batch: Any, leaves: Leaves) -> tuple[Any, Leaves]:
        """A batch as it can be held, and what is in it: as it came, or a copy without shared memory of its own.

        Args:
            batch: of the user.
            leaves: what is in it.
        """
        if not any(map(is_shared, leaves.all_tensors())) and not any(map(_map_of, leaves.arrays)):
            return batch, leaves
        opened = Leaves(batch, opens_jagged=True)
        try:
            private = _copied(batch, opened, self._copies(opened))
        except Exception:  # of a user's class, or too many containers in one another
            private = batch
        return private, leaves if private is batch else Leaves(private)

    def _copies(self, leaves: Leaves) -> dict[int, Any]:
        """Copies of the tensors and arrays whose memory only this batch has, by the id of each."""
        tensors = [tensor for tensor in leaves.tensors if is_shared(tensor)]
        memory = {id(tensor): set(map(StorageWeakRef, _storages(tensor))) for tensor in tensors}
        mapped = [(array, found) for array in leaves.arrays if (found := _map_of(array)) is not None]
        copier = _TensorCopies()
        copies: dict[int, Any] = {
            id(tensor): copier.of(tensor)
            for tensor in tensors
            if memory[id(tensor)].isdisjoint(self._seen) and _can_be_copied(tensor)
        }
        copies |= {
            id(array): array.copy()
            for array, found in mapped
            if found not in self._maps and array.nbytes <= _MAX_BYTES and not array.dtype.hasobject
        }
        self._maps.update(found for _, found in mapped)
        self._seen.update(*memory.values())
        self._latest = tensors
        if len(self._seen) > 2 * self._num_alive + 1000:
            self._seen = {storage for storage in self._seen if not storage.expired()}  # type: ignore[no-untyped-call]
            self._num_alive = len(self._seen)
        return copies


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor is in memory that other processes see: on the host, of any layout."""
    if not tensor.is_cpu:
        return False
    if tensor.layout is torch.strided:
        try:
            return tensor.untyped_storage().is_shared()
        except RuntimeError:  # of a subclass without memory of its own
            return False
    return any(map(is_shared, _parts(tensor)))


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors of one of another layout."""
    return [getattr(tensor.detach(), name)() for name in _PARTS.get(tensor.layout, ())]


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    parts = [tensor] if tensor.layout is torch.strided else _parts(tensor)
    return [part.untyped_storage() for part in parts]


def _can_be_copied(tensor: Tensor) -> bool:
    return (
        not tensor.requires_grad
        and not isinstance(tensor, torch.nn.Parameter)
        and sum(part.nbytes for part in _parts(tensor) or [tensor]) <= _MAX_BYTES
    )


def _map_of(array: Any) -> mmap.mmap | None:
    """The mapped memory that an array is in, of a file or of other processes; None: it is in no such memory."""
    base = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


class _TensorCopies:
    """Copies the tensors of one batch: those that share memory share that of the copies."""

    def __init__(self) -> None:
        self._wholes: dict[int, torch.UntypedStorage] = {}  # by address, while the batch holds the originals
        self._offsets: dict[int, Tensor] = {}  # by the id of the original

    def of(self, tensor: Tensor) -> Tensor:
        """A copy, with a whole storage if it is hardly larger."""
        if tensor.layout is torch.jagged:
            return self._jagged(tensor)
        is_view = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
        is_view = is_view and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        if is_view and (storage := tensor.untyped_storage()).nbytes() <= 2 * tensor.nbytes:
            if storage.data_ptr() not in self._wholes:
                self._wholes[storage.data_ptr()] = storage.clone()  # type: ignore[no-untyped-call]
            copied = torch.empty(0, dtype=tensor.dtype)
            copied.set_(self._wholes[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride())
        else:
            copied = tensor.clone()
        vars(copied).update(vars(tensor))
        return copied

    def _jagged(self, tensor: Any) -> Tensor:
        """A copy of a nested tensor. Those with the same offsets keep that: torch tells ragged sizes apart by them."""
        offsets, lengths = tensor.offsets(), tensor.lengths()
        if id(offsets) not in self._offsets:
            self._offsets[id(offsets)] = offsets.clone()
        copied: Tensor = torch.nested.nested_tensor_from_jagged(
            tensor.values().clone(),
            offsets=self._offsets[id(offsets)],
            lengths=None if lengths is None else lengths.clone(),
            jagged_dim=tensor._ragged_idx,
        )
        return copied


def _copied(batch: Any, leaves: Leaves, copies: dict[int, Any]) -> Any:
    """A batch with copies in place of some leaves.

    Args:
        batch: the batch.
        leaves: what is in it.
        copies: those of the leaves, by the id of each; those of containers are put in.

    Raises:
        TypeError: a container cannot be copied.
    """
    holders = _holders(leaves, copies)
    for kind, value in holders.values():
        if not isinstance(value, IMMUTABLE):
            copies[id(value)] = _shallow(kind, value)
    for _, value in holders.values():
        _rebuilt(value, holders, copies)
    for kind, value in holders.values():
        if not isinstance(value, IMMUTABLE):
            _fill(copies[id(value)], kind, value, copies)
    return copies.get(id(batch), batch)


def _holders(leaves: Leaves, targets: Iterable[int]) -> dict[int, tuple[Kind, Any]]:
    """Containers from which an object of `targets`, by their ids, can be reached, by their ids.

    The containers are in the order of their distance, so sweeps from the far end find what is above a target. Those in
    circles and chains need more of them.

    Raises:
        TypeError: the containers are too entangled.
    """
    reached, holders = set(targets), {}
    for sweep in range(_MAX_SWEEPS):
        num_before, step = len(reached), 2 * (sweep % 2) - 1
        for kind, values, members in leaves.containers[::step]:
            for value, items in zip(values[::step], members[::step], strict=True):
                if not reached.isdisjoint(map(id, items)) and id(value) not in reached:
                    reached.add(id(value))
                    holders[id(value)] = kind, value
        if len(reached) == num_before:
            return holders
    raise TypeError(f"its containers are not sorted out in {_MAX_SWEEPS} sweeps")


def _shallow(kind: Kind, value: Any) -> Any:
    """A copy of a container or an object, which has the same members."""
    has_attributes = bool(kind.names) or kind.has_dict
    if has_attributes and (hasattr(type(value), "__copy__") or any(map(_is_reference, kind.members_of(value)))):
        raise TypeError("its copy has members of its own, or one that refers to the original")
    copied = copy.copy(value)
    if copied is value or type(copied) is not type(value) or (kind.has_dict and vars(copied) is vars(value)):
        raise TypeError("it has no copy")
    return copied


def _is_reference(value: Any) -> bool:
    return isinstance(value, ReferenceType)


def _rebuilt(value: Any, holders: Mapping[int, Any], copies: dict[int, Any]) -> Any:
    """A copy of a container that cannot change, of those of its members. A circle has one that can in it."""
    key = id(value)
    if key in copies or key not in holders:
        return copies.get(key, value)
    items = [_rebuilt(item, holders, copies) for item in value]
    copies[key] = value._make(items) if hasattr(value, "_make") else type(value)(items)
    return copies[key]


def _fill(copied: Any, kind: Kind, value: Any, copies: Mapping[int, Any]) -> None:
    """Put the copies of members into the copy of a container or an object."""
    if isinstance(value, (Mapping, *SEQUENCES)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if id(item) in copies:
                copied[key] = copies[id(item)]
        return
    for name in kind.names:
        if id(item := getattr(value, name, None)) in copies:
            object.__setattr__(copied, name, copies[id(item)])
    if kind.has_dict:
        vars(copied).update((name, copies[id(item)]) for name, item in vars(value).items() if id(item) in copies)
