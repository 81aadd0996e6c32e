"""`python -m bagpipe`: a table of commands. Each adds its flags to a parser and returns its output.

argv ──COMMANDS──> command ──> text on stdout, exit code 0;   bad names and values: one line on stderr, exit code 2
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bagpipe.cli import plan, schedule
from bagpipe.errors import InputError

__all__ = ["COMMANDS", "Command", "main"]


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
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _Parser(prog="python -m bagpipe", description="Tools of the bagpipe library.", allow_abbrev=False)
    children = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS.values():
        command.add_arguments(children.add_parser(command.name, help=command.help, allow_abbrev=False))
    flags = parser.parse_args(argv)
    try:
        sys.stdout.write(COMMANDS[flags.command].run(flags))
        sys.stdout.flush()
    except InputError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    except BrokenPipeError:
        # The reader (`head`) closed the pipe. Redirect stdout, since Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
