"""`lasting_output`: standard output and standard error of a program, whatever becomes of who reads them.

closed from the start          what is written is dropped, and no file takes the descriptor's number
no character of the encoding   written as an escape
the reader is gone             the program goes on, and what it writes is dropped: a log's reader ends no training
no room, another error         the same; at the end one line says so, and the exit code is 1
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from bagpipe.errors import EXIT_DONE, EXIT_FAILED
from bagpipe.util.outputs import reason_of
from bagpipe.util.printing import print_error

__all__ = ["lasting_output"]

#: Errors of a stream whose reader has gone: a pipe's, and a terminal's.
_GONE = (errno.EPIPE, errno.EIO)


class _Output:
    """A text stream whose first failure is kept, and which takes and drops everything afterwards.

    Attributes:
        error: the failure; None: none, or the reader is gone.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self.error: OSError | None = None
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115  # as long as the process
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See `TextIO`."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See `TextIO`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """See `TextIO`."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        if error.errno not in _GONE:
            self.error = self.error or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what the stream still holds goes there, too
        os.close(nowhere)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Standard streams that a program, and the processes that it starts, can write to; its outermost block.

    Raises:
        SystemExit: instead of the end with exit code 0, if something could not be written.
    """
    _open_descriptors()
    before = sys.stdout, sys.stderr
    out, err = _Output(sys.stdout), _Output(sys.stderr)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    leaving: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as error:
            leaving = error
        finally:
            out.flush()
        if out.error is not None and (leaving is None or leaving.code in (None, EXIT_DONE)):
            print_error(f"error: cannot write standard output: {reason_of(out.error)}")
            leaving = SystemExit(EXIT_FAILED)
        if leaving is not None:
            raise leaving
    finally:
        err.flush()
        sys.stdout, sys.stderr = before


def _open_descriptors() -> None:
    """Open the standard streams that are closed, so that no other file has their numbers, here and in children.

    A pipe that does not wait for its reader makes Python lose text: it waits from here on.
    """
    for number in range(3):
        try:
            os.set_blocking(number, True)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free: this one
