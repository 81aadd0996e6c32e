"""`bagpipe`, or `python -m bagpipe`: a table of commands. Each adds its flags to a parser and returns its output.

argv ──COMMANDS──> command ──> text on stdout, exit code 0;   errors: one line on stderr, exit code by cause
  └──name of a program: train, eval, …──> `programs.run_command`: the program parses the rest itself
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import bagpipe
from bagpipe.cli import calibrate, jigsaw, plan, schedule, sweep
from bagpipe.cli.programs import run_command
from bagpipe.errors import EXIT_DONE, InputError, JobError, exit_code
from bagpipe.util import programs
from bagpipe.util.environment import explain_import
from bagpipe.util.output_streams import lasting_output
from bagpipe.util.printing import print_error, printable

__all__ = ["COMMANDS", "Command", "console", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand.

    Attributes:
        name: as typed.
        help: one line.
        add_arguments: adds its flags.
        run: parsed flags -> text for stdout.
    """

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], str]


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and no usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="schedule",
            help="print, simulate or draw a schedule",
            add_arguments=schedule.add_arguments,
            run=schedule.run,
        ),
        Command(
            name="plan",
            help="choose stages and a schedule for a model",
            add_arguments=plan.add_arguments,
            run=plan.run,
        ),
        Command(
            name="calibrate",
            help="measure this machine into a cluster file",
            add_arguments=calibrate.add_arguments,
            run=calibrate.run,
        ),
        Command(
            name="sweep",
            help="forecast step time, memory and price of jobs on clusters",
            add_arguments=sweep.add_arguments,
            run=sweep.run,
        ),
        Command(
            name="jigsaw",
            help="simulate several training jobs on one set of ranks",
            add_arguments=jigsaw.add_arguments,
            run=jigsaw.run,
        ),
    )
}


#: Help of the programs. The parser knows their names only; each parses its own flags.
_PROGRAMS: Mapping[str, str] = {
    "train": "train a model (python -m bagpipe.train under torchrun)",
    "eval": "metrics of a checkpoint's model",
    "predict": "scores of examples with a checkpoint's model",
    "export": "a checkpoint for serving, or for other programs",
    "apply": "a delta to an export: the next export",
    "rows": "rows and bytes of a namespace by table and age; a checkpoint without old rows",
    "cacher": "the Oracle Cacher: read the data, look ahead, and plan for all ranks",
    "data": "tools around the data: synth, convert, replay",
}


def console() -> int:
    """The console script ``bagpipe``: modules of the current directory can be imported, as with ``python -m``."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main(prog="bagpipe")


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m bagpipe") -> int:
    """Run one command; returns the exit code.

    Raises:
        SystemExit: after a program, ``--help``, a wrong flag, or output that could not be written.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in programs.COMMANDS:
        run_command(words[0], words[1:])
    with lasting_output():
        return _run_own(words, prog)


def _run_own(words: Sequence[str], prog: str) -> int:
    """Run one of `COMMANDS`."""
    parser = _Parser(prog=prog, description="Training with rows in a remote store.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"bagpipe {bagpipe.__version__}")
    children = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, text in _PROGRAMS.items():
        children.add_parser(name, help=text)
    for command in COMMANDS.values():
        command.add_arguments(children.add_parser(command.name, help=command.help, allow_abbrev=False))
    flags = parser.parse_args(words)
    try:
        sys.stdout.write(printable(_run(COMMANDS[flags.command], flags)))
    except (InputError, JobError) as error:
        print_error(f"{parser.prog}: error: {error}")
        return exit_code(error)
    except KeyboardInterrupt as error:
        print_error("interrupted")
        return exit_code(error)
    return EXIT_DONE


def _run(command: Command, flags: argparse.Namespace) -> str:
    try:
        return command.run(flags)
    except ModuleNotFoundError as error:
        explain_import(error)
        raise
