"""Breadth-first: v stages per rank in a loop; a stage runs all micro-batches before the next one (Lamy-Poirier 2023).

A stage gathers its parameters once and reduces its gradients once per batch. Backwards run from the last micro-batch to
the first.
"""

from __future__ import annotations

from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def breadth_first(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s mod P. Between forwards and backwards all activations of a rank are alive."""
    ranks, micro = graph.num_stages // chunks, range(graph.microbatches)
    rows = []
    for rank in range(ranks):
        stages = range(rank, graph.num_stages, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in micro]
        rows.append([*forwards, *(Action(action.stage, "B", action.index) for action in reversed(forwards))])
    return dense_program(graph, rows)
