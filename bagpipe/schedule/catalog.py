"""The schedules that can be asked for by name: the prefetch pipeline, and every dense schedule its builder registered.

name, options ──Schedule.build──> Program ──check, simulate, render──> what `python -m bagpipe schedule` prints

A dense schedule is one file in ``builders/`` and one golden table; it appears here by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bagpipe.schedule.builders import DENSE_SCHEDULES
from bagpipe.schedule.ir.errors import ScheduleError
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.registry import DenseSchedule

__all__ = ["SCHEDULES", "Option", "Schedule"]

#: Option name -> value, of the type of the option's default.
Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One parameter of a schedule: an int, a text, or a switch where the default is False."""

    name: str
    default: int | str | bool
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule by name.

    Attributes:
        name: as asked for.
        summary: one line.
        options: its parameters.
        build: parameters by name -> program.
    """

    name: str
    summary: str
    options: tuple[Option, ...]
    build: Callable[[Values], Program]


def _build_prefetch(values: Values) -> Program:
    loop = prefetch(
        prefetch_depth=values["prefetch_depth"],
        read_ahead=values["read_ahead"],
        write_depth=values["write_depth"],
        microbatches=values["microbatches"],
        train=not values["evaluate"],
        direct=values["direct"],
        ranks=values["ranks"],
    )
    return loop.unroll(values["batches"])


_PREFETCH = Schedule(
    name="prefetch",
    summary="rows prefetched ahead of training and written back behind it",
    options=(
        Option(name="batches", default=4, help="batches to show"),
        Option(name="prefetch_depth", default=4, help="batches fetched and not yet inserted, at most"),
        Option(name="read_ahead", default=8, help="batches read and not yet trained, at most"),
        Option(name="write_depth", default=2, help="batches evicted and not yet stored, at most"),
        Option(name="microbatches", default=1, help="micro-batches per batch"),
        Option(name="ranks", default=1, help="ranks of the job; one of them is shown"),
        Option(name="evaluate", default=False, help="the evaluation pipeline: forwards only"),
        Option(name="direct", default=False, help="direct mode's hazards: no cache, every batch waits for the last"),
    ),
    build=_build_prefetch,
)


def _dense(schedule: DenseSchedule) -> Schedule:
    return Schedule(
        name=schedule.name,
        summary=schedule.summary,
        options=(
            Option(name="stages", default=4, help="stages of the model; a rank holds CHUNKS of them"),
            Option(name="microbatches", default="8", help="micro-batches per batch: one number, or one per stage"),
            Option(name="chunks", default=schedule.chunks, help="stages per rank"),
            Option(name="edges", default="", help="which stage feeds which, such as 0-2,1-2,2-3; default: a chain"),
        ),
        build=partial(_build_dense, schedule),
    )


def _build_dense(schedule: DenseSchedule, values: Values) -> Program:
    return schedule.build(_stage_graph(values["stages"], values["microbatches"], values["edges"]), values["chunks"])


def _stage_graph(num_stages: int, microbatches: str, edges: str) -> StageGraph:
    counts = [_number("microbatches", "8 or 32,16,8", part, microbatches) for part in microbatches.split(",")]
    graph = chain(num_stages, counts[0])
    if len(counts) not in (1, num_stages):
        raise ScheduleError(f"microbatches: expected one number or {num_stages}, one per stage, got {len(counts)}")
    pairs = [pair.partition("-") for pair in edges.split(",")] if edges else []
    return StageGraph(
        micro_per_batch=tuple(counts) if len(counts) > 1 else graph.micro_per_batch,
        edges=tuple(
            (_number("edges", "0-1,1-2", src, edges), _number("edges", "0-1,1-2", dst, edges)) for src, _, dst in pairs
        )
        or graph.edges,
    )


def _number(option: str, example: str, text: str, whole: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ScheduleError(f"{option}: expected numbers such as {example}, got {whole!r}")
    return int(text)


SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule for schedule in (_PREFETCH, *map(_dense, DENSE_SCHEDULES.values()))
}
