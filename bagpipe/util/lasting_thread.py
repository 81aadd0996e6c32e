"""`in_lasting_thread`: calls a function in a thread that lives as long as this process.

The kernel binds some things to a thread where one expects the process: Linux sends a child its parent-death signal
(PR_SET_PDEATHSIG) when the thread that forked it ends. A child that is started here ends with the process.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

__all__ = ["in_lasting_thread"]

_Result = TypeVar("_Result")
_Calls = queue.SimpleQueue[Callable[[], None]]

_lock = threading.Lock()
_calls: _Calls | None = None


def in_lasting_thread(function: Callable[[], _Result]) -> _Result:
    """The result of a function, or its error. Returns only when the function has, whatever a signal handler raises.

    Args:
        function: short; the calls of all threads are made one after another.
    """
    result: Future[_Result] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    _queue().put(call)
    try:
        return result.result()
    finally:
        wait([result])


def _queue() -> _Calls:
    global _calls
    with _lock:
        if _calls is None:
            _calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(_calls,), name="lasting", daemon=True).start()
        return _calls


def _serve(calls: _Calls) -> None:
    while True:
        calls.get()()


def _forget() -> None:
    """A forked process has no other thread than the one that forked, and maybe a lock that nobody will release."""
    global _lock, _calls
    _lock, _calls = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
