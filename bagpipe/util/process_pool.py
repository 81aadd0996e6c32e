"""`ProcessPool`: processes that apply a function to pieces of work; the results come in order, or as they are made.

work ──submit──> process: function ──> results
     └─ one process: in the calling thread
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from types import TracebackType
from typing import Self, TypeVar

from bagpipe.errors import InputError, JobError
from bagpipe.util.parent_process import end_with_parent

__all__ = ["ProcessPool", "check_interrupt", "usable_cores"]

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")

#: Of a process of a pool: set when its pool ends early.
_stop: Event | None = None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def check_interrupt() -> None:
    """Raise KeyboardInterrupt in a process of a pool that ends early. Elsewhere it does nothing."""
    if _stop is not None and _stop.is_set():
        raise KeyboardInterrupt


def _nothing(_: None) -> None:
    """Work that is done at once."""


def _begin(stop: Event) -> None:
    global _stop
    _stop = stop
    end_with_parent()


class ProcessPool:
    """Applies a function to many pieces of work in processes. Used with `with`, which ends them.

    Ctrl-C reaches the calling process alone: the others finish their piece, or leave it at its next call of
    `check_interrupt`, and end.

    Args:
        jobs: number of processes; 1: everything runs in the calling thread.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None
        self._stop: Event | None = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            # spawn: the calling process may have threads, and a forked child inherits their locks
            context = multiprocessing.get_context("spawn")
            self._stop = context.Event()
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=context, initializer=_begin, initargs=(self._stop,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None and self._stop is not None:
            if error is not None:
                self._stop.set()
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = self._stop = None

    def start(self) -> None:
        """Start the processes, beside what the calling thread does meanwhile."""
        if self._pool is not None:
            for _ in range(self._jobs):
                self._submit(_nothing, None)

    def map(self, function: Callable[[_Work], _Result], work: Iterable[_Work]) -> Iterator[_Result]:
        """The results, in the order of the work. At most two pieces for each process are on their way.

        Raises:
            InputError: of the function, in one line.
            JobError: of the function; or a process ended.
        """
        if self._pool is None:
            yield from map(function, work)
            return
        waiting: deque[Future[_Result]] = deque()
        for piece in work:
            if len(waiting) == 2 * self._jobs:
                yield _result(waiting.popleft())
            waiting.append(self._submit(function, piece))
        while waiting:
            yield _result(waiting.popleft())

    def map_unordered(self, function: Callable[[_Work], _Result], work: Iterable[_Work]) -> Iterator[_Result]:
        """As `map`, but each result as soon as it is there."""
        if self._pool is None:
            yield from map(function, work)
            return
        waiting: set[Future[_Result]] = set()
        pieces = iter(work)
        while True:
            for piece in pieces:
                waiting.add(self._submit(function, piece))
                if len(waiting) == 2 * self._jobs:
                    break
            if not waiting:
                return
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from map(_result, done)

    def _submit(self, function: Callable[[_Work], _Result], piece: _Work) -> Future[_Result]:
        """Submit a piece. It may start a process, which inherits that interrupts are blocked."""
        assert self._pool is not None, "called with processes only"
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.submit(function, piece)
        except BrokenProcessPool:
            raise _ended() from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(future: Future[_Result]) -> _Result:
    try:
        return future.result()
    except (InputError, JobError) as error:
        # Drops the worker's traceback, which the executor attaches as the cause.
        raise error.with_traceback(None) from None
    except BrokenProcessPool:
        raise _ended() from None


def _ended() -> JobError:
    return JobError("a process ended unexpectedly; was it killed for its memory? --jobs 1 needs least")
