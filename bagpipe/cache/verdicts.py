"""`Verdicts`: numbers on their way from a device that say whether a batch is bad. No lane waits for them.

    lane compute   number of b ──to_host──> `Verdicts.add`
    any thread     `check`: those that have come       `check_before`: all of the batches before one, waits

A number is enqueued before the results of its batch, so it has come when they have: nothing of a bad batch is stored.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bagpipe.cache.staging import PendingTensor

__all__ = ["Verdict", "Verdicts"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A number on its way.

    Attributes:
        batch: number of the batch.
        number: scalar.
        is_good: whether its value is that of a good batch.
        error: makes the error of a bad one.
    """

    batch: int
    number: PendingTensor
    is_good: Callable[[Tensor], bool]
    error: Callable[[], Exception]


class Verdicts:
    """Verdicts of one run on one rank."""

    def __init__(self) -> None:
        self._pending: list[Verdict] = []
        self._lock = threading.Lock()

    def add(self, verdict: Verdict) -> None:
        """Look at a number when it has come."""
        with self._lock:
            self._pending.append(verdict)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._pending = []

    def check(self) -> None:
        """Look at the numbers that have come. From any thread.

        Raises:
            Exception: that of a bad batch.
        """
        with self._lock:
            # Lanes' numbers do not arrive in the order in which the lanes have sent them: one may hold up no other.
            here: list[Verdict] = []
            late: list[Verdict] = []
            for verdict in self._pending:
                (here if verdict.number.is_ready() else late).append(verdict)
            bad = next((verdict for verdict in here if not verdict.is_good(verdict.number.get())), None)
            if bad is not None:
                # None is forgotten: a lane and the thread that makes checkpoints both ask, and neither may go on.
                raise bad.error()
            self._pending = late

    def check_before(self, batch: int | None = None) -> None:
        """Wait for the numbers of all batches before this one; None: of all. From a thread that may wait.

        Raises:
            Exception: that of a bad batch.
        """
        with self._lock:
            verdicts = [verdict for verdict in self._pending if batch is None or verdict.batch < batch]
        for verdict in verdicts:
            if not verdict.is_good(verdict.number.get()):
                raise verdict.error()
