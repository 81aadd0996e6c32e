"""`python -m bagpipe`: one table of commands; each adds its flags to a parser and prints its answer.

argv ──COMMANDS──> command ──> text on stdout, exit code 0;   bad names and values: one line on stderr, exit code 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from bagpipe.errors import InputError
from bagpipe.schedule import render
from bagpipe.schedule.catalog import SCHEDULES, Schedule
from bagpipe.schedule.check import check
from bagpipe.schedule.ops import OPS
from bagpipe.schedule.program import Program
from bagpipe.schedule.simulate import Simulation, simulate

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
    """argparse that says what is wrong in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def _csv(program: Program, costs: Mapping[str, float]) -> str:
    return render.csv(program)


def _json(program: Program, costs: Mapping[str, float]) -> str:
    return json.dumps(render.summary(simulate(program, costs)), indent=2) + "\n"


def _rendered(draw: Callable[[Simulation], str]) -> Callable[[Program, Mapping[str, float]], str]:
    return lambda program, costs: draw(simulate(program, costs))


_FORMATS: Mapping[str, Callable[[Program, Mapping[str, float]], str]] = {
    "csv": _csv,
    "json": _json,
    **{name: _rendered(draw) for name, draw in render.RENDERERS.items()},
}


def _costs(text: str) -> dict[str, float]:
    """``X_GET=2,0F=3`` -> costs; keys are ops, or stage and op, or whole actions, as `simulate` takes them."""
    costs: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name.strip("0123456789") not in OPS:
            raise InputError(f"--cost: unknown op {name!r}; known ops: {', '.join(OPS)}")
        try:
            costs[name] = int(value) if value.isdecimal() else float(value)
        except ValueError:
            raise InputError(f"--cost: expected {name}=NUMBER, got {item!r}") from None
        if not 0 <= costs[name] < math.inf:
            raise InputError(f"--cost: expected a number of at least 0 for {name}, got {value}")
    return costs


def _schedule_arguments(parser: argparse.ArgumentParser) -> None:
    names = parser.add_subparsers(dest="schedule", metavar="NAME", required=True, parser_class=_Parser)
    for schedule in SCHEDULES.values():
        child = names.add_parser(schedule.name, help=schedule.summary, description=schedule.summary, allow_abbrev=False)
        _option_arguments(child, schedule)
        child.add_argument(
            "--cost", default="", metavar="OP=N,…", help="durations for the simulation, such as X_GET=2,F=3"
        )
        child.add_argument("--format", choices=tuple(_FORMATS), default="grid", help="default: grid")


def _option_arguments(parser: argparse.ArgumentParser, schedule: Schedule) -> None:
    for option in schedule.options:
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, dest=option.name, action="store_true", help=option.help)
        else:
            parser.add_argument(
                flag, dest=option.name, type=int, default=option.default, metavar="N",
                help=f"{option.help}; default: {option.default}",
            )  # fmt: skip


def _run_schedule(flags: argparse.Namespace) -> str:
    schedule = SCHEDULES[flags.schedule]
    program = schedule.build({option.name: getattr(flags, option.name) for option in schedule.options})
    check(program)
    return _FORMATS[flags.format](program, _costs(flags.cost))


COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="schedule",
            help="print, simulate or draw a schedule",
            add_arguments=_schedule_arguments,
            run=_run_schedule,
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
        # The reader (`head`) has what it wanted. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
