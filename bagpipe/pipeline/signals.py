"""Signals during a run: requests to stop it, or what waits until its step has ended.

StopOnSignals    1st SIGINT or SIGTERM ──> request_stop(): finish batches read   2nd ──> abort   3rd: previous handler
DeferredSignals  a signal ──> its handler at the end of the block; a 2nd SIGINT or SIGTERM: now
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["DeferredSignals", "StopOnSignals"]

_STOPS = (signal.SIGINT, signal.SIGTERM)
#: Signals whose handlers raise exceptions in programs and packages: to stop, to ask for a checkpoint, or because a
#: worker process has died. Those of timers are left alone: their handlers end what hangs.
_DEFERRED = tuple(int(number) for number in (*_STOPS, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD))


class StopOnSignals:
    """While inside the ``with``, signals call `request_stop` instead of killing the process. Main thread only.

    Args:
        request_stop: called from the signal handler, so it must neither block nor take a lock.
        signals: which ones.

    Attributes:
        received: signals received so far, in order.
    """

    def __init__(
        self,
        request_stop: Callable[[], None],
        signals: Sequence[signal.Signals] = _STOPS,
    ) -> None:
        self.received: list[signal.Signals] = []
        self._request_stop = request_stop
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        if len(self.received) == 2:
            self._restore()  # the third signal ends the process, even if it hangs
        self._request_stop()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # A handler that was not set from Python cannot be put back from Python; the default is the nearest.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class DeferredSignals:
    """Inside the ``with``, handlers of signals wait for its end, so that no exception of one leaves work half done.

    Handlers run in the main thread. In another thread, and inside a block of the same kind, nothing happens. Every step
    has such a block, so it calls what the functions of `signal` call: their enumerations take ten times as long.
    """

    def __init__(self) -> None:
        self._is_inside = False
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: dict[int, FrameType | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._is_inside = True
            try:
                for number in _DEFERRED:
                    handler = _signal.getsignal(number)
                    # A default is no function; neither is a handler that was not set from Python.
                    if callable(handler) and not _is_deferring(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._note)
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_inside:
            self._leave()
            self.check()

    def check(self) -> None:
        """Call the handlers that wait: where the work can be left as it is. What they raise is the caller's."""
        while self._waiting:
            number, frame = self._waiting.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_inside and not (number in _STOPS and any(stop in self._waiting for stop in _STOPS)):
            self._waiting[number] = frame
        else:
            self._waiting.pop(number, None)
            self._handlers[number](number, frame)

    def _leave(self) -> None:
        self._is_inside = False  # from now on `_note` hands signals on
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:  # else the work has set another one
                _signal.signal(number, handler)


def _is_deferring(handler: Any) -> bool:
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, DeferredSignals) and owner._is_inside
