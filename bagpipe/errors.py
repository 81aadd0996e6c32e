"""Errors by cause, and the exit code of each. `exit_code` alone maps errors to exit codes.

| class                             | cause                                   | exit code |
|-----------------------------------|-----------------------------------------|-----------|
| `InputError` and its subclasses   | configuration, data, or a refused store | 2         |
| `StoreError`                      | the store failed during the job         | 1         |
| `JobError`                        | the job failed                          | 1         |
| `PeerError`                       | another rank failed or is gone          | 1         |
| `KeyboardInterrupt`, `SystemExit` | a signal                                | 130       |

Subclasses of `InputError`: `CapacityError`, `ScheduleError`. Subclasses of `StoreError`: `FencedError`,
`LostRowError`, `CorruptRowError`, `ChangedRowError`, `RolledBackError`.
"""

from __future__ import annotations

__all__ = [
    "EXIT_DONE",
    "EXIT_FAILED",
    "EXIT_INPUT",
    "EXIT_INTERRUPTED",
    "CapacityError",
    "ChangedRowError",
    "CorruptRowError",
    "FencedError",
    "InputError",
    "JobError",
    "LostRowError",
    "PeerError",
    "RolledBackError",
    "ScheduleError",
    "StoreError",
    "exit_code",
]

EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


class InputError(Exception):
    """Unusable configuration, data or store. The message is one line: what was expected, what came."""


class CapacityError(InputError):
    """A batch needs more unique rows than the cache has slots."""

    @classmethod
    def of_batch(
        cls,
        batch_index: int,
        num_unique: int,
        *,
        num_slots: int,
        world_size: int,
        largest: int = 0,
        last_batch: int | None = None,
        held_out: bool = False,
        pushed: bool = False,
        num_held: int = 0,
        grows: bool = False,
    ) -> CapacityError:
        """The error of one batch.

        Args:
            batch_index: number of the batch.
            num_unique: its unique rows.
            num_slots: slots of all ranks.
            world_size: ranks.
            largest: unique rows of the largest batch from `batch_index` to `last_batch`.
            last_batch: last batch that was examined; None: only `batch_index`.
            held_out: the batches are those of the held-out examples, which have numbers of their own.
            pushed: the program brings the batches itself, and its arguments take the place of configuration keys.
            num_held: further rows, of the batch before, that stay until its update (``pipeline.rows_delay``).
            grows: the caches have grown to these slots, see `OracleSpec.grows`.
        """
        each = f" on each of {world_size} ranks, {num_slots} in all" if world_size > 1 else ""
        phase = "held-out " if held_out else ""
        cache_rows = "cache_rows" if pushed else "cache.rows"
        size, key = f"{cache_rows} is", cache_rows
        if grows:
            size, key = f"{cache_rows} auto holds at most", "cache_max_rows" if pushed else "cache.max_rows"
        known = ""
        if last_batch is not None:
            known = f", the largest need up to batch {last_batch}"
            known += "" if pushed else " (`python -m bagpipe data replay` finds the whole log's)"
        held = f" and {num_held} more of the batch before (pipeline.rows_delay 1)" if num_held else ""
        return cls(
            f"{phase}batch {batch_index} needs {num_unique} unique rows{held} but {size} "
            f"{num_slots // world_size}{each}: "
            f"raise {key} to at least {-(-max(largest, num_unique + num_held) // world_size)}{known}, "
            f"or {'bring smaller batches' if pushed else 'lower data.batch_size'}"
        )


class ScheduleError(InputError):
    """An action, a program or a schedule request is invalid."""


class StoreError(Exception):
    """The embedding store failed, timed out, or sent an invalid reply."""


class FencedError(StoreError):
    """Another job has acquired the namespace; the store refuses this job's writes."""


class LostRowError(StoreError):
    """The store no longer holds a row that was written."""


class CorruptRowError(StoreError):
    """The store returned a row with a wrong checksum: altered bytes, or another row's."""


class ChangedRowError(StoreError):
    """Rows of the store are not the ones last written: set back, changed or removed by another program."""


class RolledBackError(StoreError):
    """The store lost writes that it had acknowledged."""


class JobError(Exception):
    """The job cannot continue, and neither its input nor the store is the cause."""


class PeerError(JobError):
    """Another rank failed, is gone, or missed its deadline."""


def exit_code(error: BaseException) -> int:
    """The exit code of a program that `error` ends; see the table of this module."""
    if isinstance(error, InputError):
        return EXIT_INPUT
    return EXIT_INTERRUPTED if isinstance(error, (KeyboardInterrupt, SystemExit)) else EXIT_FAILED
