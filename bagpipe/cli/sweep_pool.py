"""`SweepPool`: processes that forecast the chunks of a sweep, one for each core; the results come in order.

chunks ──submit──> process: forecast_chunk ──> outcomes, as `map` gives them
       └─ one process, or one chunk: in the calling thread
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self, TypeVar

from bagpipe.errors import InputError, JobError
from bagpipe.util.parent_process import end_with_parent

__all__ = ["SweepPool", "usable_cores"]

_Work = TypeVar("_Work")
_Result = TypeVar("_Result")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class SweepPool:
    """Applies a function to many pieces of work in processes. Used with `with`, which ends them.

    Ctrl-C reaches the calling process alone: the others finish their piece, and end.

    Args:
        jobs: number of processes; 1: everything runs in the calling thread.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._jobs > 1:
            # spawn: the calling process may have threads, and a forked child inherits their locks
            self._pool = ProcessPoolExecutor(
                self._jobs, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def map(self, function: Callable[[_Work], _Result], work: Iterable[_Work]) -> Iterator[_Result]:
        """The results, in the order of the work. At most two pieces for each process are on their way.

        Raises:
            InputError: of the function, in one line.
            JobError: a process ended.
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
    except InputError as error:
        # Drops the worker's traceback, which the executor attaches as the cause.
        raise InputError(str(error)) from None
    except BrokenProcessPool:
        raise _ended() from None


def _ended() -> JobError:
    return JobError("a process of the sweep ended unexpectedly; was it killed for its memory? --jobs 1 needs least")
