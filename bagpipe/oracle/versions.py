"""Row versions: every update adds one, and whoever reads a row must find the version of all updates before.

The judge's replay of what reaches a reader if everything happens as late as the plan allows:

    pull early  ─ sees all updates up to two batches before
    pull now    ─ and those updates of the batch before that its sync now marks
    evict       ─ sees all updates up to `evict_after`
    fetch       ─ sees the evictions of plans up to `fetch_after`

Each method returns what was found and what should have been, and leaves the verdict to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

__all__ = ["Seen", "Versions"]


@dataclass(frozen=True, slots=True)
class Seen:
    """A version found, and the one that should have been."""

    found: int
    wanted: int

    @property
    def is_stale(self) -> bool:
        return self.found != self.wanted


@dataclass(frozen=True, slots=True)
class _Update:
    batch: int
    sync_now: bool


@dataclass(slots=True)
class _Resident:
    """A row in a slot: the version it came with, and its updates since, oldest first."""

    version: int
    updates: list[_Update] = field(default_factory=list)

    def landed(self, has_landed: Callable[[_Update], bool]) -> int:
        """The version in the slot when only such updates have landed. Old updates landed before new ones."""
        missing = 0
        for update in reversed(self.updates):
            if has_landed(update):
                break
            missing += 1
        return self.version + len(self.updates) - missing


class Versions:
    """Versions of all rows, in slots and in the store."""

    def __init__(self) -> None:
        self._wanted: dict[Hashable, int] = {}
        self._resident: dict[Hashable, _Resident] = {}
        self._stored: dict[Hashable, list[tuple[int, int]]] = {}

    def update(self, row: Hashable, batch: int, *, sync_now: bool) -> None:
        """The batch used the row; its update follows at once, or late."""
        self._resident[row].updates.append(_Update(batch, sync_now))
        self._wanted[row] += 1

    def pull(self, row: Hashable, batch: int, *, now: bool) -> Seen:
        """A consumer reads the row for a batch."""
        in_time = batch - 1 if now else batch - 2
        found = self._resident[row].landed(
            lambda update: update.batch <= batch - 2 or (update.batch <= in_time and update.sync_now)
        )
        return Seen(found, self._wanted[row])

    def evict(self, row: Hashable, batch: int, *, after: int) -> Seen:
        """The plan of a batch writes the row back once the batch `after` is updated."""
        found = self._resident.pop(row).landed(lambda update: update.batch <= after)
        self._stored.setdefault(row, []).append((batch, found))
        return Seen(found, self._wanted[row])

    def fetch(self, row: Hashable, *, after: int, unread: bool) -> Seen:
        """A plan fetches the row once the evictions up to `after` are acknowledged; `unread`: it is made anew."""
        known = [version for batch, version in self._stored.get(row, []) if batch <= after]
        found = known[-1] if known and not unread else 0
        self._resident[row] = _Resident(found)
        return Seen(found, self._wanted.setdefault(row, 0))
