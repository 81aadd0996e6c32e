"""`exiting`, `run_program`: the outermost frame of every program. Errors become one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from bagpipe.errors import EXIT_DONE, InputError, JobError, StoreError, exit_code

__all__ = ["EXPECTED_ERRORS", "exiting", "report_error", "run_program"]

#: Errors that say all in one line. Any other exception is a defect.
EXPECTED_ERRORS = (InputError, StoreError, JobError)


@contextmanager
def exiting() -> Iterator[None]:
    """Turn an error that leaves the block into ``SystemExit`` with its exit code; see `run_program`."""
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        raise SystemExit(report_error(error)) from None


def run_program(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a program's `main` and return its exit code: 0 done, 1 failure, 2 bad input, 130 interrupted.

    `InputError`, `StoreError` and `JobError` print one line on stderr; ``BAGPIPE_TRACEBACK=1`` adds the traceback. Any
    other exception is a defect and prints its traceback.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or EXIT_DONE
    except (KeyboardInterrupt, Exception) as error:
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Print the error on stderr as `run_program` does; returns its exit code."""
    if isinstance(error, EXPECTED_ERRORS):
        if os.environ.get("BAGPIPE_TRACEBACK", "") not in ("", "0"):
            traceback.print_exc()
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    elif isinstance(error, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        traceback.print_exc()
    return exit_code(error)
