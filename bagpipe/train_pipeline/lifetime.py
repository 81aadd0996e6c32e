"""`Lifetime`: when a session may be called, and what happens if its program ends without closing it.

call     one thread at a time; signals wait until the call has ended; not in a forked process
end of the program, or of the last reference to the pipeline ──> close
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from bagpipe.errors import JobError
from bagpipe.pipeline.signals import DeferredSignals
from bagpipe.util.printing import print_error

__all__ = ["Lifetime", "whole_call"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="_Callable")

#: Limit on the wait, at the end of the program, for a call that another thread makes.
_CALL_TIMEOUT_S = 30.0


class _Callable(Protocol):
    def call(self) -> AbstractContextManager[None]: ...


def whole_call(method: Callable[Concatenate[_S, _P], _R]) -> Callable[Concatenate[_S, _P], _R]:
    """A method of a session that is one call of it: inside its ``call()``, as `Lifetime.call`."""

    @functools.wraps(method)
    def call(self: _S, /, *args: _P.args, **more: _P.kwargs) -> _R:
        with self.call():
            return method(self, *args, **more)

    return call


class Lifetime:
    """The life of one session.

    Args:
        owner: of the session, which must not refer to it. When it is gone, nobody can call the session.
        close: closes the session after an error, or after none.
        num_unwritten: updated rows that are not in the store.
    """

    def __init__(
        self, owner: object, close: Callable[[BaseException | None], object], num_unwritten: Callable[[], int]
    ) -> None:
        self._close = close
        self._num_unwritten = num_unwritten
        self._lock = threading.RLock()
        self._signals = DeferredSignals()
        self._process: int | None = None
        weakref.finalize(owner, self._leave).atexit = False

    @property
    def is_elsewhere(self) -> bool:
        """The session was opened in the process from which this one was forked, and is not here."""
        return self._process not in (None, os.getpid())

    def begin(self) -> None:
        """The session is about to open something."""
        if self._process is None:
            self._process = os.getpid()
            atexit.register(self._leave)

    def end(self) -> None:
        """The session is closed."""
        atexit.unregister(self._leave)

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of the session: no other thread makes one, and handlers of signals run when it has ended.

        Raises:
            JobError: the session is open in another process, or a call waits for the thread that makes this one.
        """
        if self.is_elsewhere:
            raise JobError(
                f"the pipeline belongs to process {self._process}, from which this one was forked: make one here"
            )
        if not self._lock.acquire(blocking=not _is_lane()):
            raise JobError("a call of the pipeline waits for this loader or function, which cannot make another one")
        try:
            outer, signals = self._signals, DeferredSignals()
            with signals:
                self._signals = signals
                try:
                    yield
                finally:
                    self._signals = outer
        finally:
            self._lock.release()

    def check_signals(self) -> None:
        """Call the handlers of signals that have arrived, inside a call that can be left here."""
        self._signals.check()

    def _leave(self) -> None:
        """Close a session that its program has left open."""
        if self._process is None or self.is_elsewhere:
            return
        if _is_lane():
            # The garbage collector runs in any thread, and a lane cannot wait for its own end.
            threading.Thread(target=self._close_left).start()
        else:
            self._close_left()

    def _close_left(self) -> None:
        error: BaseException | None = None
        try:
            if not self._lock.acquire(timeout=_CALL_TIMEOUT_S):
                raise JobError(f"a call in another thread has not ended after {_CALL_TIMEOUT_S:g} s")
            try:
                self._close(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
            finally:
                self._lock.release()
        except BaseException as raised:
            error = raised
        self.end()
        if error is not None and (left := self._num_unwritten()):
            print_error(
                f"error: the program ended without pipeline.close(), and {left} updated rows could not be written to "
                f"the store: {' '.join(str(error).split()) or type(error).__name__}"
            )


def _is_lane() -> bool:
    """Whether this thread belongs to a pipeline, whose calls wait for it."""
    return threading.current_thread().name.startswith("bagpipe-")
