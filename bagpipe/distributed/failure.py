"""Failure reports and heartbeats, in the job's key-value store.

    rank 2 fails ──report─────> "failure" (written once, the first wins) ──poll─────> every rank: "rank 2: <message>"
    each rank    ──heartbeat──> "heartbeat/<rank>", a growing number     ──explain──> ranks without a new heartbeat

No call reads a key before `check` has found it, so no call blocks while the store responds.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from bagpipe.distributed.keystore import KeyStore
from bagpipe.errors import EXIT_INPUT, EXIT_INTERRUPTED, InputError, JobError, PeerError, StoreError, exit_code

__all__ = ["FAILURE_KEY", "HEARTBEAT_S", "POLL_S", "STORE_ERRORS", "Failure", "Failures", "Watcher"]

#: Key of the first failure of any rank.
FAILURE_KEY = "failure"

#: Time between two heartbeats, and between two polls of the store by the watcher.
HEARTBEAT_S = 0.5
#: How long a rank whose exchange failed searches for the cause: a late report, or four heartbeats of a dead rank.
GRACE_S = 2.0
POLL_S = 0.05

#: Prefix of an error that came from another rank. A relayed error keeps the name of its first rank.
_RANK_PREFIX = re.compile(r"rank \d+: ")

#: Errors of a store client whose server is gone or does not respond in time.
STORE_ERRORS = (RuntimeError,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of one rank.

    Attributes:
        rank: the rank.
        exit_code: exit code of its process.
        message: its error, one line.
    """

    rank: int
    exit_code: int
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure for an exception that ended `rank`."""
        message = " ".join(str(error).split())
        if not isinstance(error, (InputError, StoreError, JobError)):
            message = f"{type(error).__name__}: {message}"  # a defect: its text alone can be empty
        return cls(rank=rank, exit_code=exit_code(error), message=message)

    @property
    def cause(self) -> str:
        """The message without the name of the rank that a relayed one begins with."""
        return _RANK_PREFIX.sub("", self.message, count=1)

    def is_same(self, other: Failure) -> bool:
        """Whether `other` is this error, or this one is a relayed copy of it."""
        return self.message in (other.message, f"rank {other.rank}: {other.message}")

    def error(self) -> BaseException:
        """The exception another rank raises for this failure: same exit code, message with the failed rank."""
        text = self.message if _RANK_PREFIX.match(self.message) else f"rank {self.rank}: {self.message}"
        if self.exit_code == EXIT_INPUT:
            return InputError(text)
        return SystemExit(EXIT_INTERRUPTED) if self.exit_code == EXIT_INTERRUPTED else PeerError(text)


class Failures:
    """One rank's view of the job's failures. Thread-safe.

    Args:
        store: client of the job's store, with this attempt's prefix.
        rank, world_size: this rank and the number of ranks.
    """

    def __init__(self, store: KeyStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._num_heartbeats = 0
        self._known: Failure | None = None
        self._has_reported = False
        self._stopped = threading.Event()

    @property
    def known(self) -> Failure | None:
        """The first failure of another rank seen so far, or None. Does not query the store."""
        return self._known

    def report(self, error: BaseException) -> None:
        """Report to all ranks that this one ends with `error`, unless another rank has reported first."""
        self._has_reported = True
        own = json.dumps(asdict(Failure.of(self._rank, error)))
        with suppress(*STORE_ERRORS):  # without a store there is no rank to inform
            self._record(self._store.compare_set(FAILURE_KEY, "", own))

    def end(self) -> BaseException | None:
        """The error that ends every wait: another rank, or this one, has failed. None otherwise. Skips the store."""
        if self._known is not None:
            return self._known.error()
        return PeerError("this rank has failed, so it waits for no other") if self._has_reported else None

    def poll(self) -> Failure | None:
        """Query the store for the first failure of another rank.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._known is None and self._store.check([FAILURE_KEY]):
            self._record(self._store.get(FAILURE_KEY))
        return self._known

    def heartbeat(self) -> None:
        """Publish a heartbeat of this rank. Raises RuntimeError if the store is gone."""
        self._num_heartbeats += 1
        self._store.set(f"heartbeat/{self._rank}", str(self._num_heartbeats))

    def await_arrivals(self, timeout_s: float) -> None:
        """Wait for the first heartbeat of every rank.

        Raises:
            InputError, PeerError, SystemExit: a rank failed before it came.
            RuntimeError: a rank does not come in time, or the store is gone.
        """
        waiter = threading.Event()
        names = {rank: f"heartbeat/{rank}" for rank in range(self._world_size)}
        deadline_s = time.monotonic() + timeout_s
        while not self._store.check(list(names.values())):
            failure = self.poll()
            if failure is not None:
                raise failure.error()
            if time.monotonic() > deadline_s:
                late = [rank for rank, name in names.items() if not self._store.check([name])]
                raise RuntimeError(f"{_ranks(late)} did not come within {timeout_s:g} s")
            waiter.wait(POLL_S)

    def leave(self) -> None:
        """Mark this rank as finished with its peers, after success or failure."""
        self._stopped.set()
        with suppress(*STORE_ERRORS):
            self._store.set(f"left/{self._rank}", "")

    def await_leavers(self, timeout_s: float) -> None:
        """Wait until every rank has left. The rank that hosts the store must exit last."""
        waiter = threading.Event()
        names = [f"left/{rank}" for rank in range(self._world_size)]
        with suppress(*STORE_ERRORS):
            for _ in range(round(timeout_s / POLL_S)):
                if self._store.check(names):
                    return
                waiter.wait(POLL_S)

    def explain(self, symptom: str) -> BaseException | None:
        """Find the failed rank that caused a local error. Takes up to `GRACE_S`.

        Args:
            symptom: the local error, quoted in the result.

        Returns:
            The error to raise; None if all other ranks are alive.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            before = {rank: self.last_heartbeat(rank) for rank in others}
            for _ in range(round(GRACE_S / POLL_S)):
                failure = self.poll()
                if failure is not None:
                    return failure.error()
                left = [rank for rank in others if self._store.check([f"left/{rank}"])]
                if left:
                    return PeerError(f"{_ranks(left)} left the job too early ({symptom})")
                self._stopped.wait(POLL_S)
            silent = [rank for rank in others if self.last_heartbeat(rank) == before[rank]]
        except STORE_ERRORS:
            return PeerError(f"lost the job's key-value store, and with it rank 0 or its launcher ({symptom})")
        return PeerError(f"lost {_ranks(silent)}, dead or stopped ({symptom})") if silent else None

    def last_heartbeat(self, rank: int) -> bytes:
        """A rank's last heartbeat; empty before its first one. Raises RuntimeError if the store is gone."""
        key = f"heartbeat/{rank}"
        value: bytes = self._store.get(key) if self._store.check([key]) else b""
        return value

    def _record(self, value: bytes) -> None:
        failure = Failure(**json.loads(value))
        if failure.rank != self._rank and self._known is None:
            self._known = failure


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Watcher:
    """Thread that publishes this rank's heartbeats and calls `on_failure` once when a rank has failed.

    Args:
        failures: polled every `HEARTBEAT_S`.
        on_failure: called in the thread with the error this rank should end with.
        check: called at every heartbeat; returns a local error (a device hang), or None.
    """

    def __init__(
        self,
        failures: Failures,
        on_failure: Callable[[BaseException], None],
        check: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._failures = failures
        self._on_failure = on_failure
        self._check = check
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bagpipe-watcher", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        error: BaseException | None = None
        while error is None and not self._stop.wait(HEARTBEAT_S):
            try:
                self._failures.heartbeat()
                failure = self._failures.poll()
                error = failure.error() if failure is not None else self._check()
            except STORE_ERRORS:
                error = PeerError("lost the job's key-value store, and with it rank 0 or its launcher")
        if error is not None and not self._stop.is_set():
            self._on_failure(error)
