"""The schedules that can be asked for by name. One entry here, one builder file and one golden table make a schedule.

name, options ──Schedule.build──> Program ──check, simulate, render──> what `python -m bagpipe schedule` prints
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bagpipe.schedule.prefetch import prefetch
from bagpipe.schedule.program import Program

__all__ = ["SCHEDULES", "Option", "Schedule"]

Value = int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One parameter of a schedule: an int, or a switch where the default is False."""

    name: str
    default: Value
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
    build: Callable[[Mapping[str, Value]], Program]


def _build_prefetch(values: Mapping[str, Value]) -> Program:
    loop = prefetch(
        prefetch_depth=values["prefetch_depth"],
        read_ahead=values["read_ahead"],
        write_depth=values["write_depth"],
        microbatches=values["microbatches"],
        train=not values["evaluate"],
        direct=bool(values["direct"]),
        ranks=values["ranks"],
    )
    return loop.unroll(values["batches"])


_ENTRIES = (
    Schedule(
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
            Option(
                name="direct", default=False, help="direct mode's hazards: no cache, every batch waits for the last"
            ),
        ),
        build=_build_prefetch,
    ),
)

SCHEDULES: Mapping[str, Schedule] = {schedule.name: schedule for schedule in _ENTRIES}
