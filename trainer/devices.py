"""Checks that the device of a job exists and that the cache fits in its memory, before anything is allocated.

    run.device ──check_device──> the device exists
    tables, batch sizes ──memory_need──> bytes ──check_memory──> at most the free bytes

The size of the cache rows is exact. All other sizes are upper estimates for batches with one id per feature and
example (`memory_need`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.cache.auto_rows import free_on_cuda
from bagpipe.cache.row_transfer import WRITE_DEPTH
from bagpipe.cache.slots import record_bytes
from bagpipe.errors import InputError
from bagpipe.oracle.plan import cache_rows_in, slots_of
from bagpipe.types.schema import RowSchema

__all__ = [
    "BatchSize",
    "MemoryNeed",
    "activation_bytes",
    "check_device",
    "check_memory",
    "cuda_devices",
    "free_bytes",
    "memory_need",
]

#: Index tensors of a batch, bytes per id. An occurrence has a unique row, source, id, length, offset and bag offset
#: (28 B); a unique row has a slot, row start and name (24 B).
_ID_BYTES = 52
#: Vectors alive at the same time, per id: rows read, pooled vectors, their gradients, row gradients, and records being
#: received, sent and updated.
_VECTORS = 8
#: Copies of the dense part still to be allocated: gradients and up to two optimizer states.
_DENSE_COPIES = 3
#: Copies of a layer's outputs: before and after its activation, kept for the backward, and a gradient.
_LAYER_COPIES = 3
#: CUDA library workspaces and allocator fragmentation.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """Size of one rank's part of a batch.

    Attributes:
        num_ids: estimated number of ids.
        read_ahead: maximum number of batches read and not yet trained.
        dense_bytes: size of the dense parameters.
        activation_bytes: size of the dense activations (`activation_bytes`).
    """

    num_ids: int
    read_ahead: int
    dense_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Device memory still to be allocated, in bytes.

    Attributes:
        num_rows: ``cache.rows``, or the rows of one batch in direct mode.
        num_caches: caches of so many rows.
        row_bytes: size of a slot.
        other_bytes: estimated size of everything else.
        is_direct: direct mode, without spare slots.
    """

    num_rows: int
    row_bytes: int
    other_bytes: int
    is_direct: bool
    num_caches: int = 1

    @property
    def num_slots(self) -> int:
        """Slots of all caches."""
        return self.num_caches * (self.num_rows if self.is_direct else slots_of(self.num_rows))

    @property
    def num_bytes(self) -> int:
        """Total."""
        return self.num_slots * self.row_bytes + self.other_bytes


def check_device(device: str, num_devices: Callable[[], int]) -> None:
    """Check that a device exists.

    Args:
        device: ``run.device`` of this rank.
        num_devices: returns the number of CUDA devices.

    Raises:
        InputError: the device does not exist.
    """
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    count = num_devices()
    if not count:
        raise InputError(f"run.device is {device}, but this machine has no usable CUDA device")
    if int(index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0"
        raise InputError(f"run.device is {device}, but this machine has only {there}")


def cuda_devices() -> int:
    """Number of CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def activation_bytes(parameters: Iterable[Tensor], num_examples: int) -> int:
    """Estimated activation bytes of a forward and backward: outputs of all layers with weight matrices."""
    per_example = sum(parameter.shape[0] * parameter.itemsize for parameter in parameters if parameter.dim() > 1)
    return num_examples * per_example * _LAYER_COPIES


def memory_need(schema: RowSchema, num_rows: int, batch: BatchSize, *, num_caches: int = 1) -> MemoryNeed:
    """Device memory that a job allocates.

    Args:
        schema: row schema.
        num_rows: ``cache.rows``. 0: direct mode, which holds the rows of one batch, assumed to have distinct ids.
        batch: sizes of a batch.
        num_caches: 2 if the job evaluates during training.
    """
    widest = max((schema.row_bytes(table) for table in range(len(schema.tables))), default=0)
    rows = num_rows or batch.num_ids + batch.num_ids // 4
    in_flight = batch.read_ahead + WRITE_DEPTH + 2  # number of batches whose tensors are alive
    other = in_flight * batch.num_ids * _ID_BYTES + batch.num_ids * widest * _VECTORS
    return MemoryNeed(
        num_rows=rows,
        row_bytes=record_bytes(widest),
        other_bytes=other + batch.dense_bytes * _DENSE_COPIES + batch.activation_bytes + _WORKSPACE_BYTES,
        is_direct=not num_rows,
        num_caches=num_caches if num_rows else 1,
    )


def check_memory(need: MemoryNeed, free: int | None, device: str, *, key: str = "cache.rows") -> None:
    """Check that a job fits in device memory.

    Args:
        need: memory that the job allocates.
        free: free bytes of the device; None: unknown or unlimited.
        device: name of the device.
        key: that sets the rows.

    Raises:
        InputError: the job does not fit. The message names the bytes needed and free, and the rows that would fit.
    """
    if free is None or need.num_bytes <= free:
        return
    fitting = cache_rows_in(max(0, free - need.other_bytes) // (need.row_bytes * need.num_caches))
    rows = f"with {key} = {0 if need.is_direct else need.num_rows}"
    remedy = f"lower {key} to at most {fitting}" if fitting and not need.is_direct else "lower data.batch_size"
    raise InputError(
        f"{rows} the job needs {need.num_bytes} bytes on {device}, {need.num_slots} slots of {need.row_bytes} bytes "
        f"and an estimated {need.other_bytes} bytes for batches and the dense part, and {free} bytes are free: {remedy}"
    )


_FREE_BYTES: Mapping[str, Callable[[torch.device], int]] = {"cuda": free_on_cuda}


def free_bytes(device: str) -> int | None:
    """Free bytes of a device. None for the host, whose memory is shared and paged."""
    where = torch.device(device)
    ask = _FREE_BYTES.get(where.type)
    return None if ask is None else ask(where)
