"""Positions in the data by batch number, so that a phase can begin in the middle without reading all that comes before.

One reader state every so many batches. When there are many, every other one is dropped, so memory is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["ReaderStates"]

_MAX_KEPT = 1024


class ReaderStates:
    """Loader states of one phase, by the batch that comes next. For any number of threads."""

    def __init__(self, every: int = 16) -> None:
        self._lock = threading.Lock()
        self._every = every
        self._states: dict[int, Mapping[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._states)

    def wants(self, batch: int) -> bool:
        """Whether a state before this batch is worth taking."""
        return batch % self._every == 0

    def add(self, batch: int, state: Mapping[str, Any]) -> None:
        """Keep the state of a loader that serves `batch` next."""
        with self._lock:
            self._states[batch] = state
            if len(self._states) > _MAX_KEPT:
                self._every *= 2
                self._states = {known: kept for known, kept in self._states.items() if self.wants(known)}

    def before(self, batch: int) -> Mapping[str, Any] | None:
        """The state nearest to `batch` from which it can still be reached, or None: from the beginning."""
        with self._lock:
            known = [number for number in self._states if number <= batch]
            return self._states[max(known)] if known else None
