"""`auto_rows`: the most rows of a cache that grows (`cache.rows = auto`), from the memory that is free now.

device: records of all slots; on a host their pages are taken when rows enter
host:   slot bookkeeping of this rank, and the planner's state of the slots of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagpipe.cache.slots import record_bytes
from bagpipe.oracle.sizing import BYTES_PER_SLOT, Memory, most_rows
from bagpipe.types.schema import RowSchema
from bagpipe.util.host_memory import free_memory_bytes

__all__ = ["auto_rows", "free_on_cuda", "memories_of"]

#: Bytes of a slot in `SlotTable`.
_BOOKKEEPING_BYTES = 24


def free_on_cuda(device: torch.device) -> int:
    """Free bytes of a CUDA device."""
    free, _ = torch.cuda.mem_get_info(device)
    # torch reuses the freed memory in its allocator first.
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def memories_of(
    schema: RowSchema, device: torch.device, *, world_size: int = 1, other_bytes: int = 0
) -> tuple[Memory, ...]:
    """The memories that hold a rank's slots; those whose size is unknown are left out.

    Args:
        schema: row schema.
        device: of the cache.
        world_size: ranks of the job; all are taken to share the host.
        other_bytes: that the rank needs on the device for other things.
    """
    record = record_bytes(max((schema.row_bytes(table) for table in range(len(schema.tables))), default=1))
    on_host = _BOOKKEEPING_BYTES + BYTES_PER_SLOT
    memories = []
    if device.type == "cuda":
        free = free_on_cuda(device)
        memories.append(Memory(name=str(device), free_bytes=free, other_bytes=other_bytes, slot_bytes=record))
        record = other_bytes = 0
    host = free_memory_bytes()
    if host is not None:
        memories.append(
            Memory(
                name="the host",
                free_bytes=host,
                other_bytes=other_bytes,
                slot_bytes=on_host + record,
                num_sharing=world_size,
            )
        )
    return tuple(memories)


def auto_rows(
    schema: RowSchema,
    device: torch.device,
    table_rows: Sequence[int | None],
    *,
    world_size: int = 1,
    max_rows: int = 0,
    other_bytes: int = 0,
    num_caches: int = 1,
) -> int:
    """Rows that the cache of this rank may grow to. Ranks take the fewest of all.

    Args:
        schema, device, world_size, other_bytes: as in `memories_of`.
        table_rows, max_rows, num_caches: as in `most_rows`.

    Raises:
        InputError: see `most_rows`.
    """
    memories = memories_of(schema, device, world_size=world_size, other_bytes=other_bytes) if not max_rows else ()
    return most_rows(memories, table_rows=table_rows, world_size=world_size, num_caches=num_caches, max_rows=max_rows)
