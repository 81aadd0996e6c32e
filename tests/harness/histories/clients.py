"""`Writer` and `Reader`: threads that append and read, as long as there is a budget, and record what happens.

Budget ──a ticket for each append──> Writer: own rows ─> invoke ─> Hand ─> ok | fail | unknown, which ends it
                                     Reader: any rows ─> invoke ─> store ─> ok, or an error: connect anew
"""

from __future__ import annotations

import queue
import random
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from bagpipe.errors import InputError, StoreError
from bagpipe.store.interface import Store
from tests.harness.histories.events import Event, Kind, Phase, Recorder
from tests.harness.histories.hand import Hand, read_lists
from tests.harness.histories.rows import CAPACITY

__all__ = ["Budget", "Reader", "Writer"]

#: Writes that a refused writer tries once more.
_LATE_TRIES = 2
_JOIN_TIMEOUT_S = 330.0
_MAX_ROWS = 4


class Budget:
    """Tickets for operations, so that a history has as many as planned. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._left = 0
        self._is_closed = False

    def add(self, number: int) -> None:
        """Allow more operations."""
        with self._condition:
            self._left += number
            self._condition.notify_all()

    def close(self) -> None:
        """End all clients after their operations."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def take(self, has_other_work: Callable[[], bool] = lambda: False) -> bool:
        """Wait for a ticket or other work. False once the budget is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._left or self._is_closed or has_other_work())
            if self._left and not has_other_work():
                self._left -= 1
            return not self._is_closed

    def wake(self) -> None:
        """Make waiting clients look for other work."""
        with self._condition:
            self._condition.notify_all()


class Writer:
    """A writer of a job: the thread that decides what its process writes.

    Args:
        name: of the process in the history.
        job, writer: numbers.
        rows: that belong to it.
        hand: its process.
        buckets: bucket of each row.
        recorder, budget: shared by all clients.
        draw: its random choices.
        refetches: at times it reads rows before it writes them, as a cache that has evicted them.
    """

    def __init__(
        self,
        name: str,
        *,
        job: int,
        writer: int,
        rows: Sequence[int],
        hand: Hand,
        buckets: dict[int, int],
        recorder: Recorder,
        budget: Budget,
        draw: random.Random,
        refetches: bool,
    ) -> None:
        self.name = name
        self.hand = hand
        self._job = job
        self._writer = writer
        self._rows = tuple(rows)
        self._buckets = buckets
        self._recorder = recorder
        self._budget = budget
        self._draw = draw
        self._refetches = refetches
        self._lists: dict[int, tuple[int, ...]] = {}
        self._rotations: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._rotated: queue.SimpleQueue[tuple[list[int], dict[int, tuple[int, ...]]] | None] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=f"history-{name}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether it writes no more."""
        return self._has_ended.is_set()

    def rotate(self) -> tuple[list[int], dict[int, tuple[int, ...]]] | None:
        """Rotate its logs between two writes. Returns the groups in each log and its lists; None if it has ended."""
        self._rotations.put(True)
        self._budget.wake()
        while not self._has_ended.is_set():
            try:
                return self._rotated.get(timeout=0.05)
            except queue.Empty:
                continue
        return None if self._rotated.empty() else self._rotated.get()

    def close(self) -> None:
        """Kill its process and wait for the thread. The budget is closed, or the writer has ended.

        Raises:
            whatever the thread raised.
        """
        self.hand.signal(signal.SIGKILL)
        self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self._thread.name} does not end"
        self.hand.close()
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._has_ended.set()

    def _work(self) -> None:
        if not self._fetch(self._rows):
            return
        while self._budget.take(lambda: not self._rotations.empty()):
            if not self._rotations.empty():
                if not self._rotate():
                    return
                continue
            rows = self._choose()
            if not rows or (self._refetches and self._draw.random() < 0.3 and not self._fetch(rows)):
                return
            answer = self._append(rows)
            if answer["phase"] == Phase.OK.value:
                continue
            for _ in range(_LATE_TRIES if answer.get("refused") else 0):
                self._append(rows)
            return

    def _choose(self) -> list[int]:
        """Rows with room: often several, often of one bucket."""
        free = [row for row in self._rows if len(self._lists[row]) < CAPACITY]
        if free and self._draw.random() < 0.5:
            bucket = self._buckets[self._draw.choice(free)]
            free = [row for row in free if self._buckets[row] == bucket]
        return self._draw.sample(free, min(len(free), self._draw.randint(1, _MAX_ROWS)))

    def _append(self, rows: Sequence[int]) -> dict[str, Any]:
        invoked = self._recorder.invoke_append(self.name, job=self._job, writer=self._writer, rows=list(rows))
        lists = {row: (*self._lists[row], invoked.facts["number"]) for row in rows}
        answer = self._asked(invoked, append=lists)
        if answer["phase"] == Phase.OK.value:
            self._lists |= lists
        return answer

    def _fetch(self, rows: Sequence[int]) -> bool:
        invoked = self._recorder.invoke(self.name, Kind.READ, rows=list(rows))
        answer = self._asked(invoked, read=list(rows))
        if answer["phase"] == Phase.OK.value:
            self._lists |= {int(row): tuple(numbers) for row, numbers in answer["lists"].items()}
        return bool(answer["phase"] == Phase.OK.value and not answer["torn"])

    def _rotate(self) -> bool:
        self._rotations.get()
        invoked = self._recorder.invoke(self.name, Kind.PROOF, job=self._job, writers=[self._writer])
        answer = self._asked(invoked, rotate=True)
        is_done = bool(answer["phase"] == Phase.OK.value)
        self._rotated.put((answer["groups"], dict(self._lists)) if is_done else None)
        return is_done

    def _asked(self, invoked: Event, **request: Any) -> dict[str, Any]:
        answer = self.hand.ask(**request)
        facts = {name: answer[name] for name in ("lists", "torn", "error") if name in answer}
        self._recorder.complete(invoked, Phase(answer["phase"]), **facts)
        return answer


class Reader:
    """A client that only reads. It connects anew after an error, as another process of the history.

    Args:
        name: prefix of its names in the history.
        connect: makes a store.
        num_rows: ids are below this.
        recorder: shared by all clients.
        budget: of all readers.
        draw: its random choices.
    """

    def __init__(
        self,
        name: str,
        *,
        connect: Callable[[], Store],
        num_rows: int,
        recorder: Recorder,
        budget: Budget,
        draw: random.Random,
    ) -> None:
        self._name = name
        self._connect = connect
        self._num_rows = num_rows
        self._recorder = recorder
        self._budget = budget
        self._draw = draw
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=f"history-{name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the thread; the budget is closed. Raises whatever the thread raised."""
        self._thread.join(_JOIN_TIMEOUT_S)
        assert not self._thread.is_alive(), f"{self._thread.name} does not end"
        if self._error is not None:
            raise self._error

    def _guarded(self) -> None:
        try:
            number = 0
            while self._session(f"{self._name}.{number}"):
                number += 1
        except BaseException as error:
            self._error = error

    def _session(self, process: str) -> bool:
        """Read until an error; then True. False once the budget is closed."""
        with ExitStack() as stack:
            try:
                store = stack.enter_context(self._connect())
            except InputError:  # the server is down
                threading.Event().wait(0.02)
                return self._budget.take(lambda: True)
            while self._budget.take():
                rows = self._draw.sample(range(self._num_rows), self._draw.randint(2, self._num_rows))
                invoked = self._recorder.invoke(process, Kind.READ, rows=rows)
                try:
                    facts = read_lists(store, rows)
                except StoreError as error:
                    self._recorder.complete(invoked, Phase.UNKNOWN, error=str(error))
                    return True
                self._recorder.complete(invoked, Phase(facts.pop("phase")), **facts)
        return False
