"""`python -m bagpipe schedule NAME`: build, check, simulate and print a schedule.

    flags ──SCHEDULES──> Program ──--lower──check──> csv, --versions
                                              └─simulate(--cost, --latency)──> grid, svg, perfetto, json

``--cost`` is ``F=1,2B=3`` or a .json file with the same keys. A file must have costs for every stage's compute; a
measurement without them belongs to another model.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.costs import measured_costs
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.formats import render
from bagpipe.schedule.formats.version_text import version_text
from bagpipe.schedule.ir.actions import parse
from bagpipe.schedule.ir.ops import OPS, Role
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.lowering.optimizer import reduce_lane
from bagpipe.schedule.lowering.passes import PASSES
from bagpipe.schedule.registry import SCHEDULES
from bagpipe.schedule.schedule import Schedule

__all__ = ["FORMATS", "add_arguments", "run"]


def _json(simulation: Simulation) -> str:
    return json.dumps(render.summary(simulation), indent=2) + "\n"


#: Formats that show the simulation; csv shows the program.
_DRAWN: Mapping[str, Callable[[Simulation], str]] = {"json": _json, **render.RENDERERS}

FORMATS = ("csv", *_DRAWN)

_STAGE = re.compile(r"\d+")

#: Roles for which a cost file needs costs.
_COMPUTE: frozenset[Role] = frozenset({"forward", "backward", "input_grad", "weight_grad"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules, each with its flags."""
    names = parser.add_subparsers(dest="schedule", metavar="NAME", required=True)
    for schedule in SCHEDULES.values():
        child = names.add_parser(schedule.name, help=schedule.summary, description=schedule.summary, allow_abbrev=False)
        _option_arguments(child, schedule)
        child.add_argument(
            "--cost",
            default="",
            metavar="OP=N,…",
            help="durations, such as X_FETCH=2,F=3,1B=4, or a .json file of them",
        )
        child.add_argument(
            "--latency", default="0", metavar="N", help="added to every dependency between lanes; default: 0"
        )
        child.add_argument(
            "--lower", default="", metavar="PASS,…",
            help=f"lowering passes in this order, with each lane a process: {', '.join(PASSES)}",
        )  # fmt: skip
        child.add_argument("--format", choices=FORMATS, default="grid", help="default: grid")
        child.add_argument("--versions", action="store_true", help="print the weight versions of the actions instead")
        child.add_argument(
            "--width", type=int, default=1200, metavar="PX", help="of --format svg, at least 300; default: 1200"
        )


def _option_arguments(parser: argparse.ArgumentParser, schedule: Schedule) -> None:
    for option in schedule.options:
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            parser.add_argument(flag, dest=option.name, action="store_true", help=option.help)
            continue
        default = f"; default: {option.default}" if option.default != "" else ""
        parser.add_argument(
            flag, dest=option.name, type=type(option.default), default=option.default,
            metavar="N" if isinstance(option.default, int) else "N,…", help=option.help + default,
        )  # fmt: skip


def run(flags: argparse.Namespace) -> str:
    """The schedule as text in the requested format.

    Raises:
        InputError: the schedule does not allow the options, a pass is unknown or does not apply, or a cost or the
            latency is not a number of at least 0.
    """
    schedule = SCHEDULES[flags.schedule]
    program = schedule.program({option.name: getattr(flags, option.name) for option in schedule.options})
    program = _lowered(program, flags.lower)
    check(program)
    if flags.versions:
        return version_text(program)
    costs = _cost_file(Path(flags.cost), program) if flags.cost.endswith(".json") else _costs(flags.cost)
    _check_stages(costs, program)
    latency = _amount("--latency", flags.latency)
    if flags.width < 300:
        raise InputError(f"--width: expected at least 300 pixels, got {flags.width}")
    if flags.format == "csv":
        return render.csv(program)
    if flags.format == "svg":
        return render.svg(simulate(program, costs, latency=latency), width_px=flags.width)
    return _DRAWN[flags.format](simulate(program, costs, latency=latency))


def _lowered(program: Program, names: str) -> Program:
    """The program after the passes ``sends,reduce-grad,…``."""
    home = {lane: process for process, lane in enumerate(program.lanes)}
    home |= {reduce_lane(process): process for process in range(len(home))}
    for name in filter(None, names.split(",")):
        if name not in PASSES:
            raise InputError(f"--lower: unknown pass {name!r}; there are {', '.join(PASSES)}")
        program = PASSES[name](program, home)
    return program


def _costs(text: str) -> dict[str, float]:
    """``X_FETCH=2,0F=3`` -> costs."""
    costs: dict[str, float] = {}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        _check_key("--cost", key)
        if not equals:
            raise InputError(f"--cost: expected {key}=NUMBER, got {item!r}")
        costs[key] = _amount(f"--cost: {key}", value)
    return costs


def _cost_file(path: Path, program: Program) -> dict[str, float]:
    """Keys as in `_costs`; values are durations, or lists of measured durations, whose median counts."""
    where = f"--cost {path}"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected an object of durations by action, stage and op, or op")
    durations: dict[str, list[float]] = {}
    for key, value in values.items():
        _check_key(where, key)
        numbers = value if isinstance(value, list) else [value]
        durations[key] = [_amount(f"{where}: {key}", json.dumps(number)) for number in numbers]
    costs = measured_costs(durations)
    for action in (action for actions in program.lanes.values() for action in actions):
        for atom in () if {action.text, action.op} & costs.keys() else action.atoms:
            key = f"{atom.stage}{atom.op}"
            if OPS[atom.op].role in _COMPUTE and not {atom.text, key, atom.op} & costs.keys():
                raise InputError(f"{where}: no duration for stage {atom.stage}: expected {key} or {atom.op}")
    return costs


def _check_stages(costs: Mapping[str, float], program: Program) -> None:
    """Refuse costs of stages that the program does not have."""
    known = {atom.stage for atom in program.atoms()}
    for key in costs:
        stage = _STAGE.match(key)
        if stage is not None and (stage[0] != str(int(stage[0])) or int(stage[0]) not in known):
            raise InputError(f"--cost: {key} names stage {stage[0]}, expected one of 0 to {max(known, default=0)}")


def _check_key(where: str, key: str) -> None:
    """A key is an op (``F``), stage and op (``0F``), or an action (``0F3``)."""
    if key in OPS or key.lstrip("0123456789") in OPS:
        return
    try:
        parse(key)
    except ScheduleError:
        raise InputError(f"{where}: unknown op {key!r}; known ops: {', '.join(OPS)}") from None


def _amount(what: str, text: str) -> float:
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise InputError(f"{what}: expected a number, got {text!r}") from None
    if not 0 <= value < math.inf:
        raise InputError(f"{what}: expected a number of at least 0, got {text}")
    return value
