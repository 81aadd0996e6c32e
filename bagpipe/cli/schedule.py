"""`python -m bagpipe schedule NAME`: build, check, simulate and print a schedule.

    flags ──SCHEDULES──> Program ──--recompute-share, --lower──check──> csv, --versions
                                                                 └─simulate(--cost, --latency)──> grid, svg, …, json

``--cost`` is ``F=1,2B=3`` or a .json file with the same keys. A file must have costs for every stage's compute; a
measurement without them belongs to another model. zb-auto chooses its order by ``--cost`` and ``--latency``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.formats import render
from bagpipe.schedule.formats.cost_text import amount, check_complete, check_stages, costs_of_json, costs_of_text
from bagpipe.schedule.formats.order_text import recorded_program
from bagpipe.schedule.formats.version_text import version_text
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import parse_stage_graph
from bagpipe.schedule.lowering.optimizer import reduce_lane
from bagpipe.schedule.lowering.passes import PASSES
from bagpipe.schedule.lowering.recompute import AUTO, add_recompute, shares_of_text
from bagpipe.schedule.registry import SCHEDULES
from bagpipe.schedule.schedule import AsynchronousSchedule, DenseSchedule, DynamicSchedule, Schedule

__all__ = ["FORMATS", "add_arguments", "run"]


def _json(simulation: Simulation) -> str:
    return json.dumps(render.summary(simulation), indent=2) + "\n"


#: Formats that show the simulation; csv shows the program.
_DRAWN: Mapping[str, Callable[[Simulation], str]] = {"json": _json, **render.RENDERERS}

FORMATS = ("csv", *_DRAWN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules, each with its flags."""
    names = parser.add_subparsers(dest="schedule", metavar="NAME", required=True)
    for schedule in SCHEDULES.values():
        child = names.add_parser(schedule.name, help=schedule.summary, description=schedule.summary, allow_abbrev=False)
        _option_arguments(child, schedule)
        if _recomputes(schedule):
            _recompute_arguments(child, schedule)
        if isinstance(schedule, DynamicSchedule):
            child.add_argument(
                "--orders", default="", metavar="FILE", help="show an order of this file of pipeline.record; checks all"
            )
            child.add_argument("--batch", type=int, default=0, metavar="N", help="of --orders; default: 0")
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
            metavar="N" if isinstance(option.default, int | float) else "N,…", help=option.help + default,
        )  # fmt: skip


def _recomputes(schedule: Schedule) -> bool:
    return isinstance(schedule, DenseSchedule) and not isinstance(schedule, AsynchronousSchedule)


def _recompute_arguments(parser: argparse.ArgumentParser, schedule: Schedule) -> None:
    if "recompute_share" not in {option.name for option in schedule.options}:
        parser.add_argument(
            "--recompute-share", default="", metavar="N,…",
            help="share of its micro-batches that each stage recomputes; or of the first stage, from which the others "
            "follow; or auto: the least within --activation-bytes; default: none",
        )  # fmt: skip
    parser.add_argument(
        "--activation-bytes", default="0", metavar="N",
        help="of --recompute-share auto: most activations on a rank, where a micro-batch of a stage keeps 1; default: "
        "what the rank of the last stage keeps",
    )  # fmt: skip


def run(flags: argparse.Namespace) -> str:
    """The schedule as text in the requested format.

    Raises:
        InputError: the schedule does not allow the options, a pass is unknown or does not apply, or a cost or the
            latency is not a number of at least 0.
    """
    schedule = SCHEDULES[flags.schedule]
    is_file = flags.cost.endswith(".json")
    where = f"--cost {flags.cost}" if is_file else "--cost"
    costs = costs_of_json(_text_of(flags.cost), where) if is_file else costs_of_text(flags.cost, where)
    latency = amount("--latency", flags.latency)
    values = {option.name: getattr(flags, option.name) for option in schedule.options}
    program = _program(schedule, {**values, "costs": costs, "latency": latency}, flags)
    if _recomputes(schedule):
        program = _recomputing(program, flags)
    program = _lowered(program, flags.lower)
    check(program)
    if flags.versions:
        return version_text(program)
    if is_file:
        check_complete(costs, program, where)
    check_stages(costs, program, "--cost")
    if flags.width < 300:
        raise InputError(f"--width: expected at least 300 pixels, got {flags.width}")
    if flags.format == "csv":
        return render.csv(program)
    if flags.format == "svg":
        return render.svg(simulate(program, costs, latency=latency), width_px=flags.width)
    return _DRAWN[flags.format](simulate(program, costs, latency=latency))


def _program(schedule: Schedule, values: Mapping[str, Any], flags: argparse.Namespace) -> Program:
    """The schedule's program, or one batch of the orders that a job has recorded."""
    if not isinstance(schedule, DynamicSchedule) or not flags.orders:
        return schedule.program(values)
    graph = parse_stage_graph(values["stages"], values["microbatches"], values["edges"])
    most = schedule.configured({"in_flight": values["in_flight"]}).limits(graph)
    try:
        return recorded_program(_text_of(flags.orders, "--orders"), graph, most, batch=flags.batch)
    except ScheduleError as error:
        raise InputError(f"--orders {flags.orders}: {error}") from None


def _recomputing(program: Program, flags: argparse.Namespace) -> Program:
    """The program with the REC actions that are asked for and that it does not have."""
    text, limit = flags.recompute_share, amount("--activation-bytes", flags.activation_bytes)
    if limit and text != AUTO:
        raise InputError(f"--activation-bytes: {limit:g} needs --recompute-share {AUTO}, got {text or 'none'}")
    if not text or any(atom.op == "REC" for atom in program.atoms()):
        return program
    try:
        return add_recompute(program, shares_of_text(text, program, limit_bytes=limit))
    except ScheduleError as error:
        raise InputError(f"--recompute-share: {error}") from None


def _text_of(path: str, flag: str = "--cost") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{flag} {path}: {error}") from None


def _lowered(program: Program, names: str) -> Program:
    """The program after the passes ``sends,reduce-grad,…``."""
    home = {lane: process for process, lane in enumerate(program.lanes)}
    home |= {reduce_lane(process): process for process in range(len(home))}
    for name in filter(None, names.split(",")):
        if name not in PASSES:
            raise InputError(f"--lower: unknown pass {name!r}; there are {', '.join(PASSES)}")
        program = PASSES[name](program, home)
    return program
