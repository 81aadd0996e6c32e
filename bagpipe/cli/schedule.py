"""`python -m bagpipe schedule NAME`: build, check, simulate and print a schedule.

    flags ──SCHEDULES──> Program ──--recompute-share, --precondition, --lower, --backward-shares──check──> csv, …
                                                                                └─simulate(--cost, --latency)──> grid, …

``--cost`` is ``F=1,2B=3`` or a .json file with the same keys. A file must have costs for every stage's compute; a
measurement without them belongs to another model. zb-auto chooses its order by ``--cost`` and ``--latency``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from bagpipe.errors import InputError, ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.periodic import periodic
from bagpipe.schedule.analysis.simulate import Simulation, simulate
from bagpipe.schedule.formats import render
from bagpipe.schedule.formats.cost_text import amount, check_complete, check_stages, costs_of_json, costs_of_text
from bagpipe.schedule.formats.order_text import recorded_program
from bagpipe.schedule.formats.placement_text import (
    PlacementFigures,
    layers_of_text,
    placement_summary,
    placement_text,
)
from bagpipe.schedule.formats.version_text import version_text
from bagpipe.schedule.ir.backward_shares import shares_of_text as backward_shares_of_text
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import parse_stage_graph
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, reduce_lane
from bagpipe.schedule.lowering.partial_backward import cut_backwards, shares_of_program
from bagpipe.schedule.lowering.passes import PASSES
from bagpipe.schedule.lowering.precondition import Preconditioning, place_preconditioning
from bagpipe.schedule.lowering.recompute import AUTO, add_recompute, shares_of_text
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from bagpipe.schedule.registry import SCHEDULES
from bagpipe.schedule.schedule import AsynchronousSchedule, DenseSchedule, DynamicSchedule, Schedule
from bagpipe.util.documents import file_text

__all__ = ["FORMATS", "add_arguments", "run"]


def _json(simulation: Simulation, figures: PlacementFigures | None) -> str:
    summary = render.summary(simulation)
    if figures is not None:
        summary["precondition"] = placement_summary(figures)
    return json.dumps(summary, indent=2) + "\n"


FORMATS = ("csv", "json", *render.RENDERERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the schedules, each with its flags."""
    names = parser.add_subparsers(dest="schedule", metavar="NAME", required=True)
    for schedule in SCHEDULES.values():
        child = names.add_parser(schedule.name, help=schedule.summary, description=schedule.summary, allow_abbrev=False)
        _option_arguments(child, schedule)
        if _recomputes(schedule):
            _recompute_arguments(child, schedule)
        if isinstance(schedule, DenseSchedule):
            _precondition_arguments(child)
        if _cuts_backwards(schedule):
            _partial_arguments(child)
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


def _precondition_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precondition", default="", metavar="N,…",
        help="layers of each stage whose gradients K-FAC preconditions, or one number per stage; its work is put into "
        "gaps; default: none",
    )  # fmt: skip
    parser.add_argument(
        "--precondition-lag", type=int, default=0, metavar="N",
        help="of --precondition: 1, with the inverses of the batch before; default: 0",
    )  # fmt: skip


def _cuts_backwards(schedule: Schedule) -> bool:
    return _recomputes(schedule) and not isinstance(schedule, DynamicSchedule)


def _partial_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backward-shares", default="", metavar="N,…",
        help="micro-batches compute the backward of the last of these shares of the stages only, in turn: 0.5,1; "
        "default: of all stages",
    )  # fmt: skip
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="of --backward-shares; default: 0")


def run(flags: argparse.Namespace) -> str:
    """The schedule as text in the requested format.

    Raises:
        InputError: the schedule does not allow the options, a pass is unknown or does not apply, or a cost or the
            latency is not a number of at least 0.
    """
    schedule = SCHEDULES[flags.schedule]
    is_file = flags.cost.endswith(".json")
    where = f"--cost {flags.cost}" if is_file else "--cost"
    costs = (
        costs_of_json(file_text(flags.cost, subject="--cost"), where) if is_file else costs_of_text(flags.cost, where)
    )
    latency = amount("--latency", flags.latency)
    values = {option.name: getattr(flags, option.name) for option in schedule.options}
    program = _program(schedule, {**values, "costs": costs, "latency": latency}, flags)
    if _recomputes(schedule):
        program = _recomputing(program, flags)
    whole, figures = program, None
    if isinstance(schedule, DenseSchedule):
        program, figures = _preconditioning(program, schedule, flags, costs, latency)
    program = _lowered(program, flags.lower)
    check(program)
    if _cuts_backwards(schedule) and flags.backward_shares:
        program = _partial(whole, program, flags)
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
    simulation = simulate(program, costs, latency=latency)
    if flags.format == "json":
        return _json(simulation, figures)
    if flags.format == "svg":
        return render.svg(simulation, width_px=flags.width)
    drawn = render.RENDERERS[flags.format](simulation)
    return drawn + placement_text(figures) if figures and flags.format == "grid" else drawn


def _program(schedule: Schedule, values: Mapping[str, Any], flags: argparse.Namespace) -> Program:
    """The schedule's program, or one batch of the orders that a job has recorded."""
    if not isinstance(schedule, DynamicSchedule) or not flags.orders:
        return schedule.program(values)
    graph = parse_stage_graph(values["stages"], values["microbatches"], values["edges"])
    most = schedule.configured({"in_flight": values["in_flight"]}).limits(graph)
    try:
        return recorded_program(file_text(flags.orders, subject="--orders"), graph, most, batch=flags.batch)
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


def _preconditioning(
    program: Program, schedule: DenseSchedule, flags: argparse.Namespace, costs: Mapping[str, float], latency: float
) -> tuple[Program, PlacementFigures | None]:
    """The program with the second-order work that is asked for, with each lane a process."""
    if not flags.precondition:
        if flags.precondition_lag:
            raise InputError(f"--precondition-lag: {flags.precondition_lag} needs --precondition, got none")
        return program, None
    try:
        if isinstance(schedule, DynamicSchedule):
            raise ScheduleError(f"{schedule.name}: preconditioning needs an order of actions that is known beforehand")
        layers = layers_of_text(flags.precondition, flags.stages)
        program = flatten_pipes(program) if schedule.num_pipes > 1 else program
        home = {lane: process for process, lane in enumerate(program.lanes)}
        plain = add_optimizer(add_reduce_grad(program, home) if schedule.num_pipes > 1 else program, home)
        work = Preconditioning(layers=layers, lag=flags.precondition_lag)
        placed, placement = place_preconditioning(plain, home, work, costs, latency=latency)
    except ScheduleError as error:
        raise InputError(f"--precondition: {error}") from None
    return placed, PlacementFigures(
        placement=placement,
        period=periodic(placed, costs, latency=latency).period,
        period_plain=periodic(plain, costs, latency=latency).period,
        makespan_plain=simulate(plain, costs, latency=latency).makespan,
    )


def _partial(whole: Program, program: Program, flags: argparse.Namespace) -> Program:
    """One batch of the program with partial backwards; `whole`: before it was lowered."""
    if flags.precondition:
        raise InputError(f"--backward-shares: {flags.backward_shares} is not possible with --precondition")
    if flags.batch < 0:
        raise InputError(f"--batch: expected at least 0, got {flags.batch}")
    try:
        rule = shares_of_program(whole, backward_shares_of_text(flags.backward_shares))
        return cut_backwards(program, rule, batch=flags.batch)
    except ScheduleError as error:
        raise InputError(f"--backward-shares: {error}") from None


def _lowered(program: Program, names: str) -> Program:
    """The program after the passes ``sends,reduce-grad,…``."""
    home = {lane: process for process, lane in enumerate(program.lanes)}
    home |= {reduce_lane(process): process for process in range(len(home))}
    for name in filter(None, names.split(",")):
        if name not in PASSES:
            raise InputError(f"--lower: unknown pass {name!r}; there are {', '.join(PASSES)}")
        program = PASSES[name](program, home)
    return program
