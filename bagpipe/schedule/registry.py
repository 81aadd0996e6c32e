"""Registry of schedules. A new dense schedule is a builder, one entry of `SCHEDULES`, and a golden table.

python -m bagpipe schedule NAME:  options ──Schedule.program──────┐
trainer, partition, config:       StageGraph ──DenseSchedule.build─┴──> Program
"""

from __future__ import annotations

from collections.abc import Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.breadth_first import breadth_first
from bagpipe.schedule.builders.chimera import chimera
from bagpipe.schedule.builders.dualpipe_v import dualpipe_v
from bagpipe.schedule.builders.gpipe import gpipe
from bagpipe.schedule.builders.graphpipe import graphpipe
from bagpipe.schedule.builders.interleaved import interleaved
from bagpipe.schedule.builders.one_f_one_b import eager_one_f_one_b, one_f_one_b
from bagpipe.schedule.builders.zero_bubble import zb_h1, zb_v
from bagpipe.schedule.schedule import DenseSchedule, PrefetchSchedule, Schedule

__all__ = ["DENSE_SCHEDULES", "SCHEDULES", "dense_schedule"]

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        PrefetchSchedule(name="prefetch", summary="rows prefetched ahead of training and written back behind it"),
        DenseSchedule(name="1f1b", summary="one forward and one backward in turn", builder=one_f_one_b),
        DenseSchedule(
            name="breadth-first",
            summary="all micro-batches through one stage after the other",
            builder=breadth_first,
            chunks=2,
            fixed_chunks=False,
        ),
        DenseSchedule(
            name="chimera",
            summary="two pipes in opposite directions; every rank holds a stage of each",
            builder=chimera,
            num_pipes=2,
        ),
        DenseSchedule(
            name="dualpipe-v",
            summary="two stages per rank in a V, a forward and a backward as one action",
            builder=dualpipe_v,
            chunks=2,
        ),
        DenseSchedule(
            name="eager-1f1b",
            summary="1F1B with one more forward ahead per hop, which hides the hops' latency",
            builder=eager_one_f_one_b,
        ),
        DenseSchedule(name="gpipe", summary="all forwards, then all backwards", builder=gpipe),
        DenseSchedule(
            name="graph",
            summary="1F1B on a DAG of stages, each with its own number of micro-batches",
            builder=graphpipe,
            linear=False,
        ),
        DenseSchedule(
            name="interleaved",
            summary="1F1B over several stages per rank, in a loop",
            builder=interleaved,
            chunks=2,
            fixed_chunks=False,
        ),
        DenseSchedule(
            name="zb-h1",
            summary="1F1B with weight gradients filling the drain, at most P micro-batches in flight",
            builder=zb_h1,
        ),
        DenseSchedule(
            name="zb-v",
            summary="two stages per rank in a V, weight gradients filling idle time",
            builder=zb_v,
            chunks=2,
        ),
    )
}

#: The schedules of dense stages.
DENSE_SCHEDULES: Mapping[str, DenseSchedule] = {
    name: schedule for name, schedule in SCHEDULES.items() if isinstance(schedule, DenseSchedule)
}


def dense_schedule(name: str) -> DenseSchedule:
    """The dense schedule of that name.

    Raises:
        ScheduleError: no such schedule; the message lists the names.
    """
    if name not in DENSE_SCHEDULES:
        raise ScheduleError(f"no dense schedule {name!r}; there are {', '.join(DENSE_SCHEDULES)}")
    return DENSE_SCHEDULES[name]
