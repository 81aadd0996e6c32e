"""Row versions: every update adds one, and a read must find the version after all previous updates.

Replays what a reader finds if everything happens as late as the plan allows:

    pull early  ─ sees all updates up to two batches before
    pull now    ─ also the updates of the previous batch that its sync now marks, unless rows are read a batch late
    evict       ─ sees all updates up to `evict_after`
    fetch       ─ sees the evictions of plans up to `fetch_after`

Each method returns the version found and the version wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

__all__ = ["Seen", "Versions"]


@dataclass(frozen=True, slots=True)
class Seen:
    """The version found, and the version wanted."""

    found: int
    wanted: int

    @property
    def is_stale(self) -> bool:
        return self.found != self.wanted


@dataclass(frozen=True, slots=True)
class _Update:
    batch: int
    push_now: bool


@dataclass(slots=True)
class _Resident:
    """A row in a slot: its version at the insert, and its updates since, oldest first."""

    version: int
    updates: list[_Update] = field(default_factory=list)

    def landed(self, has_landed: Callable[[_Update], bool]) -> int:
        """The version in the slot if only these updates have landed. Updates land in order."""
        missing = 0
        for update in reversed(self.updates):
            if has_landed(update):
                break
            missing += 1
        return self.version + len(self.updates) - missing


class Versions:
    """Versions of all rows, in slots and in the store.

    Args:
        rows_delay: updates before the latest one that a pull must see, 0 or 1 (`OracleSpec.rows_delay`).
    """

    def __init__(self, rows_delay: int = 0) -> None:
        self._rows_delay = rows_delay
        self._wanted: dict[Hashable, int] = {}
        self._resident: dict[Hashable, _Resident] = {}
        self._stored: dict[Hashable, list[tuple[int, int]]] = {}

    def update(self, row: Hashable, batch: int, *, push_now: bool) -> None:
        """The batch used the row; its update follows now or late."""
        self._resident[row].updates.append(_Update(batch, push_now))
        self._wanted[row] += 1

    def pull(self, row: Hashable, batch: int, *, now: bool) -> Seen:
        """A consumer reads the row for a batch."""
        resident, last = self._resident[row], batch - 1 - self._rows_delay
        in_time = min(last, batch - 1 if now else batch - 2)
        found = resident.landed(
            lambda update: update.batch <= batch - 2 or (update.batch <= in_time and update.push_now)
        )
        return Seen(found, self._wanted[row] - sum(update.batch > last for update in resident.updates))

    def evict(self, row: Hashable, batch: int, *, after: int) -> Seen:
        """The plan of a batch writes the row back once the batch `after` is updated."""
        found = self._resident.pop(row).landed(lambda update: update.batch <= after)
        self._stored.setdefault(row, []).append((batch, found))
        return Seen(found, self._wanted[row])

    def delete(self, row: Hashable) -> None:
        """The row leaves its slot and the store: it begins anew."""
        for versions in (self._wanted, self._resident, self._stored):
            versions.pop(row, None)

    def fetch(self, row: Hashable, *, after: int, unread: bool) -> Seen:
        """A plan fetches the row once the evictions up to `after` are acknowledged; `unread`: it starts new."""
        known = [version for batch, version in self._stored.get(row, []) if batch <= after]
        found = known[-1] if known and not unread else 0
        self._resident[row] = _Resident(found)
        return Seen(found, self._wanted.setdefault(row, 0))
