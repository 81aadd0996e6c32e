"""Breadth-first: v stages per rank in a loop, every stage takes all micro-batches at once (Lamy-Poirier 2023).

A stage's parameters are gathered once and its gradients reduced once per batch; backwards go from the last micro-batch
to the first.
"""

from __future__ import annotations

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program
from bagpipe.schedule.registry import register


@register("breadth-first", "all micro-batches through one stage after the other", chunks=2, fixed_chunks=False)
def breadth_first(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s mod P; all of a rank's activations are alive at the turn."""
    ranks, micro = graph.num_stages // chunks, range(graph.microbatches)
    rows = []
    for rank in range(ranks):
        stages = range(rank, graph.num_stages, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in micro]
        rows.append([*forwards, *(Action(action.stage, "B", action.index) for action in reversed(forwards))])
    return dense_program(graph, rows)
