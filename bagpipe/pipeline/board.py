"""`Board`: shared progress of the lanes: units done per op, waiting lanes, end of the data, first error.

    lane: wait(op, need) ──blocks while done[op] < need──> True, or False if the data ends before the lane's batch
    lane: wait_any(needs) ──blocks until one of several needs is met
    lane: advance(op)    ──done[op] += 1──> wakes exactly the lanes that can now continue
    any: fail(error)     ──> every waiting lane raises Aborted; the first error is kept
    caller: rest()       ──blocks until all lanes but its own wait or have ended

Each op belongs to one lane and finishes its units in order, so one number per op describes its progress. A lane that
must wait registers its need under the lock and sleeps on its own gate. The thread that satisfies the need removes the
registration under the same lock and opens the gate. There are therefore no lost or spurious wake-ups, and the
registered lanes are exactly those that cannot continue. A lane that waits for any of several needs is registered with
all of them, and removed from all by the first. When all running lanes are registered, the board reports a
deadlock.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bagpipe.errors import JobError

__all__ = ["NO_END", "Aborted", "Board"]

#: End of the data while it is unknown.
NO_END = sys.maxsize

#: How often a lane that waits calls its check (`Board.check_while_waiting`). Python runs signal handlers in the main
#: thread only, and a signal that arrives just before its sleep does not end the sleep.
_CHECK_S = 0.5


class Aborted(BaseException):
    """Stops a lane because of an error in another lane. Never leaves the pipeline package."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """A lane, and what it waits for: op -> units, one of which must be done."""

    lane: int
    needs: Mapping[int, int]
    batch: int


class Board:
    """Progress of one run.

    Args:
        op_names: names by op number, for messages.
        lane_names: names by lane number, for messages.
        end: number of the first batch that does not exist; `NO_END` if unknown.
        done: per op, units finished before the start; default: 0.

    Attributes:
        done: per op, units finished, including those before the start. Readable without the lock: it only grows, so a
            read value is at worst stale.
        end: batches >= end do not exist. Readable without the lock: it only shrinks.
        error: the first error, if any.
        peak_waiting: peak number of lanes waiting at the same time.
    """

    def __init__(
        self, op_names: Sequence[str], lane_names: Sequence[str], end: int = NO_END, done: Sequence[int] = ()
    ) -> None:
        self.done = list(done) or [0] * len(op_names)
        self.end = end
        self.error: BaseException | None = None
        self.peak_waiting = 0
        self.op_names = op_names
        self._lane_names = lane_names
        self._lock = threading.Lock()
        self._resting = threading.Condition(self._lock)
        self._gates = [threading.Lock() for _ in lane_names]
        for gate in self._gates:
            gate.acquire()  # a closed gate; release opens it for one passage
        self._waiting: list[list[_Waiter]] = [[] for _ in op_names]
        self._checks: dict[int, Callable[[], object]] = {}
        self._num_waiting = 0
        self._num_alive = len(lane_names)

    def check_while_waiting(self, lane: int, check: Callable[[], object]) -> None:
        """Call a function about twice a second while a lane waits, in the lane's thread. It may call `fail`."""
        self._checks[lane] = check

    def advance(self, op: int) -> None:
        """One more unit of `op` is done. Called only by the op's own lane."""
        with self._lock:
            self.done[op] += 1
            waiting = self._waiting[op]
            if waiting:
                self._release([w for w in waiting if w.needs[op] <= self.done[op]])

    def wait(self, lane: int, op: int, need: int, batch: int, check: Callable[[], object] | None = None) -> bool:
        """Block lane until `need` units of `op` are done.

        Args:
            lane, op, need, batch: see `wait_any`.
            check: called about twice a second meanwhile. What it raises ends the wait, and nothing else.

        Returns:
            False if `batch`, the lane's next batch, is at or after the end.

        Raises:
            Aborted: a lane failed, or the lanes are deadlocked.
        """
        return self.wait_any(lane, {op: need}, batch, check)

    def wait_any(
        self, lane: int, needs: Mapping[int, int], batch: int, check: Callable[[], object] | None = None
    ) -> bool:
        """Block lane until so many units of one of several ops are done.

        Args:
            lane: its number.
            needs: op -> units; at least one.
            batch: the lane's next batch.
            check: see `wait`.

        Returns:
            False if the batch is at or after the end.

        Raises:
            Aborted: a lane failed, or the lanes are deadlocked.
        """
        with self._lock:
            if self.error is not None:
                raise Aborted
            if batch >= self.end:
                return False
            if any(self.done[op] >= need for op, need in needs.items()):
                return True
            waiter = _Waiter(lane, needs, batch)
            for op in needs:
                self._waiting[op].append(waiter)
            self._num_waiting += 1
            self.peak_waiting = max(self.peak_waiting, self._num_waiting)
            self._call_deadlock()
            self._resting.notify_all()
        try:
            self._pass_gate(lane, check)
        except BaseException:  # of a check, or of a signal
            self._withdraw(waiter)
            raise
        if self.error is not None:
            raise Aborted
        return batch < self.end

    def _pass_gate(self, lane: int, check: Callable[[], object] | None) -> None:
        checks = [each for each in (self._checks.get(lane), check) if each is not None]
        if not checks:
            self._gates[lane].acquire()
            return
        while not self._gates[lane].acquire(timeout=_CHECK_S):
            for each in checks:
                each()

    def _withdraw(self, waiter: _Waiter) -> None:
        """A lane does not wait any more. Its gate is closed, as it was."""
        with self._lock:
            if any(waiter in waiting for waiting in self._waiting):
                self._release([waiter])
        self._gates[waiter.lane].acquire()

    def finish(self, end: int) -> None:
        """Set the number of batches to `end`. Lanes that wait for a later batch return."""
        with self._lock:
            self.end = min(self.end, end)
            for waiting in self._waiting:
                self._release([w for w in waiting if w.batch >= self.end])

    def leave(self) -> None:
        """A lane has ended."""
        with self._lock:
            self._num_alive -= 1
            self._call_deadlock()
            self._resting.notify_all()

    def rest(self) -> None:
        """Block until every lane but one waits or has ended, or the run has failed.

        For the thread that walks that one lane, between two of its turns: until its next turn no lane acts.
        """
        with self._lock:
            self._resting.wait_for(lambda: self.error is not None or self._num_waiting >= self._num_alive - 1)

    def fail(self, error: BaseException) -> bool:
        """Keep the first error and wake all lanes. True if this is the first error."""
        with self._lock:
            return self._fail(error)

    def _fail(self, error: BaseException) -> bool:
        first = self.error is None
        if first:
            self.error = error
        for waiting in self._waiting:
            self._release(list(waiting))
        self._resting.notify_all()
        return first

    def _release(self, waiters: Sequence[_Waiter]) -> None:
        for waiter in waiters:
            for op in waiter.needs:
                self._waiting[op].remove(waiter)
            self._num_waiting -= 1
            self._gates[waiter.lane].release()

    def _call_deadlock(self) -> None:
        if self.error is None and self._num_alive and self._num_waiting == self._num_alive:
            waiters = {w.lane: w for waiting in self._waiting for w in waiting}
            waits = [
                f"{self._lane_names[w.lane]} at batch {w.batch} waits for {' or '.join(self._spell_needs(w))}"
                for w in waiters.values()
            ]
            self._fail(JobError(f"deadlock: {'; '.join(waits)}"))

    def _spell_needs(self, waiter: _Waiter) -> list[str]:
        return [
            f"{self.op_names[op]} ({self.done[op]} done, {need} needed)" for op, need in sorted(waiter.needs.items())
        ]
