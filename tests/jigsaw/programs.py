"""A timeline as a `Program`: the simulator of schedules computes the times of the same order anew.

lane "rank r": F and B of stage j (a job), micro-batch k x workers + w        lane "exchange j": REDUCE_GRAD of k
edges: B waits for its F, REDUCE_GRAD of k for all B of k, F of k for REDUCE_GRAD of k - 1
"""

from __future__ import annotations

from collections.abc import Callable

from bagpipe.jigsaw.timeline import Timeline
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program, Stage

__all__ = ["costs_of", "program_of"]


def program_of(timeline: Timeline) -> Program:
    """The order of a timeline, without its times."""
    lanes: dict[str, tuple[Action, ...]] = {}
    for rank in range(timeline.ranks):
        lanes[f"rank {rank}"] = tuple(
            Action(stage=piece.job, op=op, index=piece.iteration * timeline.jobs[piece.job].workers + piece.worker)
            for piece in timeline.of_rank(rank)
            for op in "FB"
        )
    edges: list[Edge] = []
    for number, job in enumerate(timeline.jobs):
        lanes[f"exchange {number}"] = tuple(
            Action(stage=number, op="REDUCE_GRAD", index=iteration) for iteration in range(job.iterations)
        )
        for src, dst, delay in (("F", "B", 0), ("B", "REDUCE_GRAD", 0), ("REDUCE_GRAD", "F", 1)):
            edges.append(Edge(src=src, dst=dst, src_stage=number, dst_stage=number, delay=delay))
    stages = tuple(Stage(number=n, micro_per_batch=job.workers) for n, job in enumerate(timeline.jobs))
    return Program(lanes=lanes, edges=tuple(edges), stages=stages)


def costs_of(timeline: Timeline) -> Callable[[Action], float]:
    """Seconds of its actions, from the jobs alone."""

    def cost(action: Action) -> float:
        job = timeline.jobs[action.stage]
        if action.op == "REDUCE_GRAD":
            return job.exchange_s
        assert action.index is not None
        iteration, worker = divmod(action.index, job.workers)
        return job.forward_s if action.op == "F" else job.backward_of_s(job.share_of(worker, iteration))

    return cost
