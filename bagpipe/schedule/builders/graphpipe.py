"""GraphPipe: 1F1B on a DAG of stages, one per rank, each with its own micro-batch size (Jeon et al. 2025).

A stage runs forwards up to its limit of micro-batches in flight, then one backward and one forward in turn.

    equal sizes      limit = stages on the longest path to the end. The makespan depends on the depth of the DAG, not on
                     the number of stages: (M + depth - 1) (F + B)
    different sizes  the smallest limit that does not lengthen the step, found by simulation from the end of the DAG;
                     the search starts at limit_i = max over consumers j of limit_j + lcm(size_i, size_j), in examples,
                     which is exact where sizes do not shrink along the path

The search assumes equal forward times per example for all stages, and backwards that take twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.simulate import simulate
from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["in_flight_limits"]


def graphpipe(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s; edges can lead to lower stage numbers."""
    return _limited(graph, in_flight_limits(graph))


def in_flight_limits(graph: StageGraph) -> tuple[int, ...]:
    """Per stage, the limit of its micro-batches in flight; see the module's rule."""
    counts = graph.micro_per_batch
    if len(set(counts)) == 1:
        return tuple(min(depth, counts[0]) for depth in graph.depths)
    batch = math.lcm(*counts)  # examples, in the largest unit that makes every micro-batch a whole number
    size = [batch // count for count in counts]
    limits = list(counts)  # no limit: the shortest makespan
    shortest = _makespan(graph, limits)

    def is_enough(stage: int, limit: int) -> bool:
        return _makespan(graph, [*limits[:stage], limit, *limits[stage + 1 :]]) <= shortest

    for stage in reversed(graph.order):
        below = [limits[c] * size[c] + math.lcm(size[stage], size[c]) for c in graph.consumers[stage]]
        limit = min(counts[stage], -(-max(below, default=size[stage]) // size[stage]))
        while limit > 1 and is_enough(stage, limit - 1):
            limit -= 1
        while limit < counts[stage] and not is_enough(stage, limit):
            limit += 1
        limits[stage] = limit
    return tuple(limits)


def _limited(graph: StageGraph, limits: Sequence[int]) -> Program:
    """1F1B rows with at most `limits` micro-batches in flight."""
    rows = [Row() for _ in limits]
    for stage, (row, count, limit) in enumerate(zip(rows, graph.micro_per_batch, limits, strict=True)):
        row.add(stage, "F", limit)
        row.add(stage, "BF", count - limit)
        row.add(stage, "B", limit)
    return dense_program(graph, [row.actions for row in rows])


def _makespan(graph: StageGraph, limits: Sequence[int]) -> float:
    """Makespan of the 1F1B rows; a batch's forward through a stage takes 1. Infinite if the limits deadlock."""
    batch = math.lcm(*graph.micro_per_batch)
    forward = {f"{stage}F": batch // count for stage, count in enumerate(graph.micro_per_batch)}
    backward = {f"{stage}B": 2 * batch // count for stage, count in enumerate(graph.micro_per_batch)}
    try:
        return simulate(_limited(graph, limits), forward | backward).makespan
    except ScheduleError:  # deadlock: a stage cannot hold what the next one needs for one micro-batch
        return math.inf
