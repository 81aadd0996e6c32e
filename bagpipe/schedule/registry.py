"""Registry of schedules. A new dense schedule is a builder, one entry of `SCHEDULES`, and a golden table.

python -m bagpipe schedule NAME:  options ──Schedule.program──────┐
trainer, partition, config:       StageGraph ──DenseSchedule.build─┴──> Program
"""

from __future__ import annotations

from collections.abc import Mapping

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.asynchronous import (
    pipedream,
    pipedream_2bw,
    pipedream_vertical,
    pipeoptim,
    spectrain,
    spectrain_v2,
)
from bagpipe.schedule.builders.breadth_first import breadth_first
from bagpipe.schedule.builders.chimera import chimera, chimera_doubling, chimera_halving
from bagpipe.schedule.builders.dualpipe_v import dualpipe_v
from bagpipe.schedule.builders.dynamic import dynamic
from bagpipe.schedule.builders.gpipe import gpipe
from bagpipe.schedule.builders.graphpipe import graphpipe
from bagpipe.schedule.builders.interleaved import interleaved
from bagpipe.schedule.builders.one_f_one_b import eager_one_f_one_b, one_f_one_b
from bagpipe.schedule.builders.shifted import one_f_one_b_shifted
from bagpipe.schedule.builders.v_shape import v_half, v_min
from bagpipe.schedule.builders.zero_bubble import interleaved_zero_bubble, zb_h1, zb_h2, zb_v
from bagpipe.schedule.builders.zero_bubble_auto import zb_auto
from bagpipe.schedule.schedule import (
    AsynchronousSchedule,
    DenseSchedule,
    DynamicSchedule,
    Option,
    PrefetchSchedule,
    Schedule,
)

__all__ = [
    "ASYNCHRONOUS_SCHEDULES",
    "CHAIN_SCHEDULES",
    "DENSE_SCHEDULES",
    "LINEAR_SCHEDULES",
    "SCHEDULES",
    "TRAINED_SCHEDULES",
    "dense_schedule",
]

SCHEDULES: Mapping[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        PrefetchSchedule(name="prefetch", summary="rows prefetched ahead of training and written back behind it"),
        DenseSchedule(name="1f1b", summary="one forward and one backward in turn", builder=one_f_one_b),
        DenseSchedule(
            name="1f1b-shifted",
            summary="1F1B that recomputes activations while it waits for gradients, none on the last stage",
            builder=one_f_one_b_shifted,
            settings=(
                Option(
                    name="recompute_share",
                    default="1",
                    help="share of the micro-batches that the first stage recomputes, from which those of later stages "
                    "follow; or one per stage, or auto",
                ),
            ),
        ),
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
            name="chimera-doubling",
            summary="chimera with two forwards per slot: no bubbles between units if B = 2F, twice the activations",
            builder=chimera_doubling,
            num_pipes=2,
        ),
        DenseSchedule(
            name="chimera-halving",
            summary="chimera-doubling on halves of the micro-batches",
            builder=chimera_halving,
            num_pipes=2,
        ),
        DenseSchedule(
            name="dualpipe-v",
            summary="two stages per rank in a V, a forward and a backward as one action",
            builder=dualpipe_v,
            chunks=2,
        ),
        DynamicSchedule(
            name="dynamic",
            summary="every rank takes what is ready, a backward before a forward; the order is found while training",
            builder=dynamic,
            settings=(
                Option(
                    name="in_flight",
                    default=0,
                    help="most micro-batches in flight on the first rank, evenly fewer on each next; 0: as 1f1b",
                ),
            ),
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
            name="interleaved-zero-bubble",
            summary="interleaved, with weight gradients filling the drain",
            builder=interleaved_zero_bubble,
            chunks=2,
            fixed_chunks=False,
        ),
        DenseSchedule(
            name="v-half",
            summary="two stages per rank in a V, half of 1F1B's activation memory",
            builder=v_half,
            chunks=2,
        ),
        DenseSchedule(
            name="v-min",
            summary="two stages per rank in a V, a third of 1F1B's activation memory",
            builder=v_min,
            chunks=2,
        ),
        DenseSchedule(
            name="zb-auto",
            summary="the shortest zero-bubble schedule found for the given costs, latency and memory",
            builder=zb_auto,
            settings=(
                Option(
                    name="memory",
                    default="",
                    help="most micro-batches in flight: 4, or one number per rank, such as 4,4,3,2; default: no limit",
                ),
            ),
            uses_costs=True,
        ),
        DenseSchedule(
            name="zb-h1",
            summary="1F1B with weight gradients filling the drain, at most P micro-batches in flight",
            builder=zb_h1,
        ),
        DenseSchedule(
            name="zb-h2",
            summary="zb-h1 with 2P - 1 micro-batches in flight: no rank waits if F = I = W",
            builder=zb_h2,
        ),
        DenseSchedule(
            name="zb-v",
            summary="two stages per rank in a V, weight gradients filling idle time",
            builder=zb_v,
            chunks=2,
        ),
        AsynchronousSchedule(
            name="pipedream",
            summary="asynchronous: 1F1B without a flush; a backward uses the weights of its forward",
            builder=pipedream,
        ),
        AsynchronousSchedule(
            name="pipedream-vertical",
            summary="asynchronous: pipedream with vertical sync, one version of a batch on all ranks",
            builder=pipedream_vertical,
        ),
        AsynchronousSchedule(
            name="pipedream-2bw",
            summary="asynchronous: 1F1B without a flush; all weights are one update behind",
            builder=pipedream_2bw,
        ),
        AsynchronousSchedule(
            name="spectrain",
            summary="asynchronous: 1F1B without a flush; forwards and backwards predict their weights",
            builder=spectrain,
        ),
        AsynchronousSchedule(
            name="spectrain-v2",
            summary="asynchronous: 1F1B without a flush; a forward predicts its weights and those of its backward",
            builder=spectrain_v2,
        ),
        AsynchronousSchedule(
            name="pipeoptim",
            summary="asynchronous: 1F1B without a flush; forwards predict the weights of their backwards",
            builder=pipeoptim,
            settings=(Option(name="prediction_offset", default=0, help="steps added to every prediction"),),
        ),
    )
}

#: The asynchronous schedules of dense stages.
ASYNCHRONOUS_SCHEDULES: Mapping[str, AsynchronousSchedule] = {
    name: schedule for name, schedule in SCHEDULES.items() if isinstance(schedule, AsynchronousSchedule)
}

#: The synchronous schedules of dense stages.
DENSE_SCHEDULES: Mapping[str, DenseSchedule] = {
    name: schedule
    for name, schedule in SCHEDULES.items()
    if isinstance(schedule, DenseSchedule) and name not in ASYNCHRONOUS_SCHEDULES
}

#: Schedules of chains with one stage per rank that plans are compared with. On a stage graph they keep more in flight
#: than `graph`, which hides slow links.
LINEAR_SCHEDULES = ("gpipe", "1f1b", "eager-1f1b")

#: Those of chains with one stage per rank that forecasts vary.
CHAIN_SCHEDULES = (*LINEAR_SCHEDULES, "zb-h1", "zb-h2")

#: Those by which a job can be trained.
TRAINED_SCHEDULES: Mapping[str, DenseSchedule] = {**DENSE_SCHEDULES, **ASYNCHRONOUS_SCHEDULES}


def dense_schedule(name: str) -> DenseSchedule:
    """The dense schedule of that name.

    Raises:
        ScheduleError: no such schedule; the message lists the names.
    """
    schedule = SCHEDULES.get(name)
    if not isinstance(schedule, DenseSchedule):
        raise ScheduleError(f"no dense schedule {name!r}; there are {', '.join(TRAINED_SCHEDULES)}")
    return schedule
