"""Errors that say whose fault it is. Programs turn them into exit codes; nothing else decides exit codes.

| class        | whose fault                            | exit code |
|--------------|----------------------------------------|-----------|
| `InputError` | configuration, data, or a refused store | 2         |
| `StoreError` | the store failed while the job ran      | 1         |
| `JobError`   | the job failed while it ran             | 1         |
| `PeerError`  | another rank failed, or is gone          | 1         |

Errors of the store with a name of their own, all `StoreError`: `FencedError`, `LostRowError`, `CorruptRowError`,
`RolledBackError`.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CorruptRowError",
    "FencedError",
    "InputError",
    "JobError",
    "LostRowError",
    "PeerError",
    "RolledBackError",
    "StoreError",
]


class InputError(Exception):
    """The user's configuration, data or store cannot be used: one line saying what was expected and what came."""


class CapacityError(InputError):
    """A batch needs more unique rows than the cache has slots."""

    @classmethod
    def of_batch(cls, batch_index: int, num_unique: int, *, num_slots: int, world_size: int) -> CapacityError:
        """The error with the numbers; the slots are those of all ranks."""
        each = f" on each of {world_size} ranks, {num_slots} in all" if world_size > 1 else ""
        return cls(
            f"batch {batch_index} needs {num_unique} unique rows but cache.rows is {num_slots // world_size}{each}: "
            f"raise cache.rows to at least {-(-num_unique // world_size)}, or lower data.batch_size"
        )


class StoreError(Exception):
    """The embedding store failed, timed out, or answered something it must not."""


class FencedError(StoreError):
    """Another job has taken the namespace over: nothing more of this one is written."""


class LostRowError(StoreError):
    """A row that was written is not in the store any more."""


class CorruptRowError(StoreError):
    """The store gave a row whose check word does not fit: other bytes than were written, or another row's."""


class RolledBackError(StoreError):
    """The store has forgotten writes that it acknowledged."""


class JobError(Exception):
    """The job cannot go on for a reason that is neither the input's nor the store's."""


class PeerError(JobError):
    """Another rank failed, is gone, or was silent for longer than the deadline."""
