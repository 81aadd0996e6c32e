"""`StepReaderStates`: the reader_state that each checkpoint to come needs, out of those that come with the steps.

step 0 ─ 16 ─ 32 ─ 48 ─ 64 ─ …   checkpoint 50 needs that of step 48, so those of 16 and 32 are forgotten at once
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

__all__ = ["StepReaderStates"]

#: Kept where no checkpoint's step is known beforehand: the last ones read.
_MAX_LAST = 16


class StepReaderStates:
    """ReaderStates by batch. One thread adds, another asks.

    Args:
        every: batches between two checkpoints; 0: there is only one, at the end.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[int, Mapping[str, Any]]] = {}  # by interval: batch and reader_state

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, batch: int, reader_state: Mapping[str, Any]) -> None:
        """Batches come in ascending order."""
        interval = -(-batch // self._every) if self._every else batch
        with self._lock:
            self._kept[interval] = (batch, reader_state)
            if not self._every and len(self._kept) > _MAX_LAST:
                del self._kept[min(self._kept)]

    def before(self, step: int) -> Mapping[str, Any] | None:
        """The nearest one up to a step; steps are asked for in ascending order. None if there is none."""
        with self._lock:
            known = {interval: batch for interval, (batch, _) in self._kept.items() if batch <= step}
            if not known:
                return None
            nearest = max(known)
            for interval in known:
                if interval != nearest:
                    del self._kept[interval]
            return self._kept[nearest][1]
