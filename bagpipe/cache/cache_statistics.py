"""`CacheStatistics`: occupancy and counters of a `RowCache`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatistics:
    """Occupancy of the cache, and totals since it was created.

    Attributes:
        num_slots: number of slots.
        resident, dirty: slots that hold a row; slots that hold a row newer than the store's.
        inserted: rows put into slots; `initialised` of them had no stored value.
        evicted: rows that left their slots; `evicted_dirty` of them were written back.
        updated: row updates.
    """

    num_slots: int
    resident: int
    dirty: int
    inserted: int
    initialised: int
    evicted: int
    evicted_dirty: int
    updated: int
