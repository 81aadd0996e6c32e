"""Stop requests from SIGINT and SIGTERM.

1st signal ──> request_stop(): finish batches read      2nd ──> request_stop(): abort      3rd: previous handler
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopOnSignals"]


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
        signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM),
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
