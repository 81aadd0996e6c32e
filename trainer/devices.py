"""Whether the device of a job is there, and whether its cache fits: asked before anything is opened, or allocated.

    run.device ──check_device──> there is such a device
    tables, sizes of a batch ──memory_need──> bytes ──check_memory──> at most the bytes that are free

Of what is needed the rows of the cache are known exactly; the rest is estimated, on the high side, for batches with one
id per feature and example (`memory_need`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bagpipe.cache.row_transfer import WRITE_DEPTH
from bagpipe.cache.slots import record_bytes
from bagpipe.errors import InputError
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

#: Index tensors of a batch, bytes per id: unique row, source, id, length, offset and bag offset of an occurrence (28),
#: and slot, row start and name of a unique row (24).
_ID_BYTES = 52
#: Vectors of a batch that are alive at once, per id: rows read, pooled vectors, their gradients, gradients of rows, and
#: records arriving, leaving and being updated.
_VECTORS = 8
#: Copies of the dense part: parameters are there already; gradients and up to two states of the optimizer are not.
_DENSE_COPIES = 3
#: Copies of a layer's outputs: before and after its activation, kept for the backward, and a gradient.
_LAYER_COPIES = 3
#: Workspaces of CUDA's libraries, and what an allocator loses between blocks.
_WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """What one rank has of a batch.

    Attributes:
        num_ids: ids, as far as it is known before they are read.
        read_ahead: batches read and not yet trained, at most.
        dense_bytes: of the parameters of the dense part.
        activation_bytes: of its activations (`activation_bytes`).
    """

    num_ids: int
    read_ahead: int
    dense_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes on the device, beside those that are taken already.

    Attributes:
        num_rows: of the cache.
        row_bytes: of a slot.
        other_bytes: all else, estimated.
        is_direct: the rows are those of a batch: there is no cache.
    """

    num_rows: int
    row_bytes: int
    other_bytes: int
    is_direct: bool

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.num_rows * self.row_bytes + self.other_bytes


def check_device(device: str, num_devices: Callable[[], int]) -> None:
    """Whether there is such a device.

    Args:
        device: ``run.device`` of this rank.
        num_devices: of CUDA.

    Raises:
        InputError: there is none.
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
    """CUDA devices that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def activation_bytes(parameters: Iterable[Tensor], num_examples: int) -> int:
    """An estimate of what a forward and backward of so many examples hold: the outputs of layers with matrices."""
    per_example = sum(parameter.shape[0] * parameter.itemsize for parameter in parameters if parameter.dim() > 1)
    return num_examples * per_example * _LAYER_COPIES


def memory_need(schema: RowSchema, num_rows: int, batch: BatchSize) -> MemoryNeed:
    """What a job needs.

    Args:
        schema: of the rows.
        num_rows: ``cache.rows``; 0: direct mode, whose rows are those of a batch, each id another.
        batch: its sizes.
    """
    widest = max((schema.row_bytes(table) for table in range(len(schema.tables))), default=0)
    rows = num_rows or batch.num_ids + batch.num_ids // 4
    in_flight = batch.read_ahead + WRITE_DEPTH + 2  # so long a batch's tensors are held
    other = in_flight * batch.num_ids * _ID_BYTES + batch.num_ids * widest * _VECTORS
    return MemoryNeed(
        num_rows=rows,
        row_bytes=record_bytes(widest),
        other_bytes=other + batch.dense_bytes * _DENSE_COPIES + batch.activation_bytes + _WORKSPACE_BYTES,
        is_direct=not num_rows,
    )


def check_memory(need: MemoryNeed, free: int | None, device: str) -> None:
    """Whether it fits.

    Args:
        need: what a job needs.
        free: bytes free on the device; None: it is not known, or not a limit.
        device: its name.

    Raises:
        InputError: it does not; names the bytes needed and free, and the rows that would fit.
    """
    if free is None or need.num_bytes <= free:
        return
    fitting = max(0, free - need.other_bytes) // need.row_bytes
    rows = f"with cache.rows = {0 if need.is_direct else need.num_rows}"
    remedy = f"lower cache.rows to at most {fitting}" if fitting and not need.is_direct else "lower data.batch_size"
    raise InputError(
        f"{rows} the job needs {need.num_bytes} bytes on {device}, {need.num_rows} rows of {need.row_bytes} bytes and "
        f"an estimated {need.other_bytes} bytes for batches and the dense part, and {free} bytes are free: {remedy}"
    )


def _free_on_cuda(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    # What torch keeps of freed memory it will use first.
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


_FREE_BYTES: Mapping[str, Callable[[torch.device], int]] = {"cuda": _free_on_cuda}


def free_bytes(device: str) -> int | None:
    """Bytes that a job can still take on its device; None on a host, whose memory is shared and paged."""
    where = torch.device(device)
    ask = _FREE_BYTES.get(where.type)
    return None if ask is None else ask(where)
