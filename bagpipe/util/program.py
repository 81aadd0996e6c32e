"""`run_program`: the outermost frame of every program. It turns errors into one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from bagpipe.errors import EXIT_DONE, InputError, JobError, StoreError, exit_code

__all__ = ["run_program"]


def run_program(main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a program's `main` and return its exit code: 0 done, 1 failure, 2 bad input, 130 interrupted.

    `InputError`, `StoreError` and `JobError` print one line on stderr; ``BAGPIPE_TRACEBACK=1`` adds the traceback. Any
    other exception is a defect and prints its traceback.
    """
    try:
        return main(sys.argv[1:] if argv is None else argv) or EXIT_DONE
    except (InputError, StoreError, JobError) as error:
        if os.environ.get("BAGPIPE_TRACEBACK", "") not in ("", "0"):
            traceback.print_exc()
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return exit_code(error)
    except KeyboardInterrupt as error:
        sys.stderr.write("interrupted\n")
        return exit_code(error)
    except Exception as error:
        traceback.print_exc()
        return exit_code(error)
