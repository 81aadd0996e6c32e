"""`run_command`: runs a program by the name of its command, a key of `bagpipe.util.programs.COMMANDS`.

Packages that are not installed end it in one line, like every `InputError`: a program's modules are imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from bagpipe.util.output_streams import lasting_output
from bagpipe.util.program import exiting
from bagpipe.util.programs import COMMANDS, import_program

__all__ = ["run_command"]


def run_command(command: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a program, and exit with its code.

    Args:
        command: a key of `bagpipe.util.programs.COMMANDS`.
        argv: arguments behind the command; None: those of this process.

    Raises:
        SystemExit: always.
    """
    program, words = COMMANDS[command]
    with lasting_output():
        with exiting():
            cli = import_program(program)
        sys.exit(cli.main([*words, *(sys.argv[1:] if argv is None else argv)]))
