"""`most_rows`: the bound of a cache that grows, from the memories it may take and the rows that there are. Pure.

Memory (device, host): half of what is free ──/ bytes a slot──> slots ──cache_rows_in──> rows ─┐
rows of all tables, of the planner's slot numbers, of the user ────────────────────────────────┴─ the fewest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import InputError
from bagpipe.oracle.plan import cache_rows_in
from bagpipe.oracle.spec_check import MAX_SLOTS

__all__ = ["BYTES_PER_SLOT", "MAX_SLOT_BYTES", "Memory", "most_rows"]

#: Memory of a planner for a slot of any rank, 22 B in arrays and 40 B queued, and the most for the slots of all ranks.
BYTES_PER_SLOT = 64
MAX_SLOT_BYTES = 32 << 30
#: The part of a memory that a cache may take: the rest is for batches, activations and other programs.
_PART = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A memory that holds slots.

    Attributes:
        name: of the memory, for errors.
        free_bytes: not in use.
        other_bytes: of them, those that the job needs for other things.
        slot_bytes: of one slot of a rank.
        num_sharing: ranks that share it.
    """

    name: str
    free_bytes: int
    other_bytes: int = 0
    slot_bytes: int
    num_sharing: int = 1

    @property
    def num_slots(self) -> int:
        """Slots of one rank for which there is room."""
        room = (self.free_bytes - self.other_bytes * self.num_sharing) // _PART
        return max(0, room // (self.slot_bytes * self.num_sharing))


def most_rows(
    memories: Sequence[Memory],
    *,
    table_rows: Sequence[int | None],
    world_size: int = 1,
    num_caches: int = 1,
    max_rows: int = 0,
) -> int:
    """Rows that a rank's cache may grow to.

    Args:
        memories: each of them holds a part of every slot.
        table_rows: as in `OracleSpec`: a cache never needs more rows than there are.
        world_size: ranks of the job.
        num_caches: caches of so many rows on each rank.
        max_rows: `cache.max_rows`; it counts in place of the memories. 0: not given.

    Raises:
        InputError: a memory has no room for a row.
    """
    known = [rows for rows in table_rows if rows is not None]
    bounds = [cache_rows_in(min(MAX_SLOTS, MAX_SLOT_BYTES // BYTES_PER_SLOT) // world_size)]
    if len(known) == len(table_rows):
        bounds.append(max(1, sum(known)))
    if max_rows:
        return min(*bounds, max_rows)
    for memory in memories:
        rows = cache_rows_in(memory.num_slots // num_caches)
        if not rows:
            raise InputError(
                f"cache.rows auto: {memory.free_bytes} bytes are free on {memory.name}, of which batches and the dense "
                f"part of {memory.num_sharing} ranks need an estimated {memory.other_bytes * memory.num_sharing}: half "
                f"of the rest holds no slot of {memory.slot_bytes} bytes; free memory, or set cache.max_rows"
            )
        bounds.append(rows)
    return min(bounds)
