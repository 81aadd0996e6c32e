"""The first rank's error, told to all ranks through the job's key-value store.

    rank 2 fails ──report──> "failure" (written once, the first wins) ──look──> every rank: "rank 2: <its line>"
    each rank    ──beat────> "beat/<rank>", a number that grows       ──suspects──> who has stopped beating

Rule of this file: nothing here waits for a key that may never come, so a store that answers answers at once.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from bagpipe.distributed.keystore import KeyStore
from bagpipe.errors import EXIT_INPUT, EXIT_INTERRUPTED, InputError, JobError, PeerError, StoreError, exit_code

__all__ = ["BEAT_S", "Failure", "Failures", "Watcher"]

#: Time between two beats, and between two looks at the store.
BEAT_S = 0.5
#: How long a rank whose exchange failed looks for the reason: a reporter's delay, or four beats of a dead rank.
GRACE_S = 2.0
_LOOK_S = 0.05

#: How an error begins that came from another rank; passed on, it keeps the name of the rank where it began.
_OF_A_RANK = re.compile(r"rank \d+: ")

#: What a store client raises when its server is gone, or does not answer in time.
STORE_ERRORS = (RuntimeError,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a rank ended.

    Attributes:
        rank: the rank.
        exit_code: of its process.
        message: its error, one line.
    """

    rank: int
    exit_code: int
    message: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure that an exception ending a rank's job is."""
        message = " ".join(str(error).split())
        if not isinstance(error, (InputError, StoreError, JobError)):
            message = f"{type(error).__name__}: {message}"  # a defect, whose text alone may say nothing
        return cls(rank=rank, exit_code=exit_code(error), message=message)

    def is_same(self, other: Failure) -> bool:
        """Another rank's error is this one, or was passed on by it."""
        return self.message in (other.message, f"rank {other.rank}: {other.message}")

    def error(self) -> BaseException:
        """What another rank ends with: the same exit code, and whose fault it was."""
        text = self.message if _OF_A_RANK.match(self.message) else f"rank {self.rank}: {self.message}"
        if self.exit_code == EXIT_INPUT:
            return InputError(text)
        return SystemExit(EXIT_INTERRUPTED) if self.exit_code == EXIT_INTERRUPTED else PeerError(text)


class Failures:
    """One rank's view of who has failed. Every method may be called from any thread.

    Args:
        store: a client of the job's store, with this attempt's prefix.
        rank, world_size: of this rank.
    """

    def __init__(self, store: KeyStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._beats = 0
        self._known: Failure | None = None
        self._has_reported = False
        self._stop_looking = threading.Event()

    @property
    def known(self) -> Failure | None:
        """The first failure of another rank, as far as this one has heard; asks nobody."""
        return self._known

    def report(self, error: BaseException) -> None:
        """Tell all ranks that this one ends with `error`, unless another rank was first."""
        self._has_reported = True
        mine = json.dumps(asdict(Failure.of(self._rank, error)))
        with suppress(*STORE_ERRORS):  # nobody is left to be told
            self._note(self._store.compare_set("failure", "", mine))

    def end(self) -> BaseException | None:
        """What a wait for the others must end with: another rank has failed, or this one has. Asks nobody."""
        if self._known is not None:
            return self._known.error()
        return PeerError("this rank has failed, so it waits for no other") if self._has_reported else None

    def look(self) -> Failure | None:
        """The first failure of another rank, or None.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._known is None and self._store.check(["failure"]):
            self._note(self._store.get("failure"))
        return self._known

    def beat(self) -> None:
        """Show that this rank is alive. Raises RuntimeError if the store is gone."""
        self._beats += 1
        self._store.set(f"beat/{self._rank}", str(self._beats))

    def leave(self) -> None:
        """This rank is done with its peers, in whatever way."""
        self._stop_looking.set()
        with suppress(*STORE_ERRORS):
            self._store.set(f"left/{self._rank}", "")

    def await_leavers(self, timeout_s: float) -> None:
        """Wait until every rank has left: the rank that hosts the store must go last."""
        waiter = threading.Event()
        names = [f"left/{rank}" for rank in range(self._world_size)]
        with suppress(*STORE_ERRORS):
            for _ in range(round(timeout_s / _LOOK_S)):
                if self._store.check(names):
                    return
                waiter.wait(_LOOK_S)

    def explain(self, words: str) -> BaseException | None:
        """The error to end with if another rank's end is the reason for what happened here. Takes up to `GRACE_S`.

        Args:
            words: what happened here.

        Returns:
            None if all others are alive and well.
        """
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        try:
            before = {rank: self.pulse(rank) for rank in others}
            for _ in range(round(GRACE_S / _LOOK_S)):
                failure = self.look()
                if failure is not None:
                    return failure.error()
                left = [rank for rank in others if self._store.check([f"left/{rank}"])]
                if left:
                    return PeerError(f"{_ranks(left)} left the job too early ({words})")
                self._stop_looking.wait(_LOOK_S)
            silent = [rank for rank in others if self.pulse(rank) == before[rank]]
        except STORE_ERRORS:
            return PeerError(f"lost the job's key-value store, and with it rank 0 or its launcher ({words})")
        return PeerError(f"lost {_ranks(silent)}, dead or stopped ({words})") if silent else None

    def pulse(self, rank: int) -> bytes:
        """A rank's last beat; nothing if it has not begun. Raises RuntimeError if the store is gone."""
        beat: bytes = self._store.get(f"beat/{rank}") if self._store.check([f"beat/{rank}"]) else b""
        return beat

    def _note(self, value: bytes) -> None:
        failure = Failure(**json.loads(value))
        if failure.rank != self._rank and self._known is None:
            self._known = failure


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Watcher:
    """A thread that beats for this rank and calls `on_failure` once when another rank has failed.

    Args:
        failures: whose store is looked at every `BEAT_S`.
        on_failure: called in the thread, with the error this rank should end with.
        check: called at every beat; returns an error of this rank's own making (a device that hangs), or None.
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
        while error is None and not self._stop.wait(BEAT_S):
            try:
                self._failures.beat()
                failure = self._failures.look()
                error = failure.error() if failure is not None else self._check()
            except STORE_ERRORS:
                error = PeerError("lost the job's key-value store, and with it rank 0 or its launcher")
        if error is not None and not self._stop.is_set():
            self._on_failure(error)
