"""`Progress`: the steps done of a long command, on standard error: a bar on a terminal, else a line every 10 seconds.

phase(name) ──(done, total), …──> tqdm, if standard error is a terminal and tqdm is installed
                              └─> "plan: measuring the model: 210 of 481, 43 %, 10 s"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

__all__ = ["Progress"]


class Progress:
    """Shows the phases of one command. Used with `with`, which removes the bar at the end.

    Args:
        command: the command's name, which begins each line.
        stream: where; None: standard error.
        every_s: time between two lines without a terminal.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        command: str,
        *,
        stream: TextIO | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._stream = sys.stderr if stream is None else stream
        self._every_s = every_s
        self._clock = clock
        self._begin_s = self._line_s = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_bar()

    def phase(self, name: str) -> Callable[[int, int], None]:
        """Begin a phase. Returns the function that takes the steps done and all steps, after each step."""
        self._end_bar()
        tqdm = _tqdm() if self._stream.isatty() else None
        if tqdm is None:
            return lambda done, total: self._line(name, done, total)
        bar = self._bar = tqdm(desc=f"{self._command}: {name}", file=self._stream, leave=False)

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return show

    def _line(self, name: str, done: int, total: int) -> None:
        now_s = self._clock()
        if now_s - self._line_s < self._every_s:
            return
        self._line_s = now_s
        passed = f"{done:,} of {total:,}, {done / total:.0%}, {now_s - self._begin_s:.0f} s"
        print(f"{self._command}: {name}: {passed}", file=self._stream, flush=True)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _tqdm() -> Any:
    """The class of the bar, or None: the library alone does not need it."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm
