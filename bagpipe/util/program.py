"""`exiting`, `run_program`: the outermost frame of every program. Errors become one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bagpipe.errors import EXIT_DONE, EXIT_INTERRUPTED, InputError, JobError, StoreError, exit_code

__all__ = ["exiting", "run_program"]

#: Errors that say all in one line. Any other exception is a defect.
_EXPECTED = (InputError, StoreError, JobError)


@contextmanager
def exiting() -> Iterator[None]:
    """Turn an error that leaves the block into ``SystemExit`` with its exit code; see `run_program`.

    A signal handler's SystemExit that interrupts the clean-up after an error does not hide the error: torchrun signals
    the ranks that are left when one has failed.
    """
    try:
        yield
    except SystemExit as leaving:
        error = leaving.__context__
        if leaving.code == EXIT_INTERRUPTED and isinstance(error, _EXPECTED):
            raise SystemExit(_report(error)) from None
        raise
    except (KeyboardInterrupt, Exception) as error:
        raise SystemExit(_report(error)) from None


def run_program(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a program's `main` and return its exit code: 0 done, 1 failure, 2 bad input, 130 interrupted.

    `InputError`, `StoreError` and `JobError` print one line on stderr; ``BAGPIPE_TRACEBACK=1`` adds the traceback. Any
    other exception is a defect and prints its traceback.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or EXIT_DONE
    except (KeyboardInterrupt, Exception) as error:
        return _report(error)


def _report(error: BaseException) -> int:
    """Print the error; returns its exit code."""
    if isinstance(error, _EXPECTED):
        if os.environ.get("BAGPIPE_TRACEBACK", "") not in ("", "0"):
            traceback.print_exception(error)
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    elif isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        traceback.print_exception(error)
    return exit_code(error)
