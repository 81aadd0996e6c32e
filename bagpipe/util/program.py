"""`exiting`, `run_program`: the outermost frame of every program. Errors become one line on stderr and an exit code.

`note`, `printed_warnings`: lines on stderr that are no errors.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bagpipe.errors import EXIT_DONE, EXIT_INTERRUPTED, InputError, JobError, StoreError, exit_code
from bagpipe.util.environment import explain_import
from bagpipe.util.printing import print_error

__all__ = ["PacedNotes", "PrintError", "exiting", "note", "printed_warnings", "run_program"]

#: Prints an error with the given function, or leaves it to another process.
PrintError = Callable[[BaseException, Callable[[BaseException], None]], None]

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OWN_FOLDERS = tuple(os.path.join(_ROOT, name, "") for name in ("bagpipe", "cacher", "data", "trainer"))
_INSTALLED_FOLDERS = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

#: Seconds between two notes about the progress of the same work.
NOTE_INTERVAL_S = 5.0

#: Errors that say all in one line. Any other exception is a defect.
_EXPECTED = (InputError, StoreError, JobError)


def note(text: str) -> None:
    """Print a note to stderr."""
    print_error(f"note: {text}")


class PacedNotes:
    """Prints notes about long work to stderr, at most one in `NOTE_INTERVAL_S`."""

    def __init__(self) -> None:
        self._start_s = self._noted_s = time.monotonic()

    def __call__(self, text_of: Callable[[float], str]) -> None:
        """Print a note, if one is due.

        Args:
            text_of: the note, from the seconds since the work began.
        """
        now_s = time.monotonic()
        if now_s - self._noted_s >= NOTE_INTERVAL_S:
            self._noted_s = now_s
            note(text_of(now_s - self._start_s))


class _WarningLines(logging.Handler):
    """Prints each warning once, in one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        text = " ".join(record.getMessage().split())
        if text not in self._printed:
            self._printed.add(text)
            print_error(f"warning: {text}")


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Print warnings of the library's loggers in the block, whatever other packages do to the root logger."""
    logger, lines = logging.getLogger("bagpipe"), _WarningLines()
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(lines)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.propagate = propagated


def _print_always(error: BaseException, write: Callable[[BaseException], None]) -> None:
    write(error)


@contextmanager
def exiting(print_error: PrintError = _print_always) -> Iterator[None]:
    """Turn an error that leaves the block into ``SystemExit`` with its exit code; see `run_program`.

    A signal handler's SystemExit that interrupts the clean-up after an error does not hide the error: torchrun signals
    the ranks that are left when one has failed.

    Args:
        print_error: decides whether this process prints the error. Not asked for tracebacks of ``BAGPIPE_TRACEBACK=1``.
    """
    try:
        yield
    except SystemExit as leaving:
        error = leaving.__context__
        if leaving.code == EXIT_INTERRUPTED and isinstance(error, _EXPECTED):
            raise SystemExit(_report(error, print_error)) from None
        raise
    except (KeyboardInterrupt, Exception) as error:
        raise SystemExit(_report(error, print_error)) from None


def run_program(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a program's `main` and return its exit code: 0 done, 1 failure, 2 bad input, 130 interrupted.

    `InputError`, `StoreError` and `JobError` print one line on stderr; ``BAGPIPE_TRACEBACK=1`` adds the traceback. Any
    other exception is a defect and prints its traceback, from the first frame of the user's own code if that failed.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or EXIT_DONE
    except (KeyboardInterrupt, Exception) as error:
        return _report(error)


def _report(error: BaseException, print_error: PrintError = _print_always) -> int:
    """Print the error; returns its exit code. A package that is not installed is bad input."""
    try:
        explain_import(error)
    except InputError as explained:
        error = explained
    if _wants_tracebacks():
        _write(error)
    else:
        print_error(error, _write)
    return exit_code(error)


def _write(error: BaseException) -> None:
    if isinstance(error, _EXPECTED):
        if _wants_tracebacks():
            print_error("".join(traceback.format_exception(error)).removesuffix("\n"))
        print_error(f"error: {' '.join(str(error).split())}")
    elif isinstance(error, KeyboardInterrupt):
        print_error("interrupted")
    else:
        _print_traceback(error)


def _print_traceback(error: BaseException) -> None:
    """Print the traceback of a defect. If a function of the user's own failed, it begins at its frame."""
    printed = traceback.TracebackException.from_exception(error)
    files = [frame.filename for frame in printed.stack]
    first = next((number for number, file in enumerate(files) if _is_of_user(file)), 0)
    if first and not _wants_tracebacks() and not _is_of_project(files[-1]):
        printed.stack = traceback.StackSummary.from_list(printed.stack[first:])
        print_error(f"{first} frames before the first one of your code are left out (BAGPIPE_TRACEBACK=1 shows them)")
    print_error("".join(printed.format()).removesuffix("\n"))


def _is_of_project(file: str) -> bool:
    return file.startswith(_OWN_FOLDERS)


def _is_of_user(file: str) -> bool:
    """Whether a file belongs neither to the project nor to Python or an installed package."""
    return os.path.isabs(file) and not file.startswith((*_OWN_FOLDERS, *_INSTALLED_FOLDERS))


def _wants_tracebacks() -> bool:
    return os.environ.get("BAGPIPE_TRACEBACK", "") not in ("", "0")
