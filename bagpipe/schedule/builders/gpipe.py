"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program
from bagpipe.schedule.registry import register
from bagpipe.schedule.row import Row


@register("gpipe", "all forwards, then all backwards")
def gpipe(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank; every micro-batch's activations are alive at the turn."""
    rows = [Row() for _ in range(graph.num_stages)]
    for stage, row in enumerate(rows):
        row.add(stage, "F", graph.microbatches)
        row.add(stage, "B", graph.microbatches)
    return dense_program(graph, [row.actions for row in rows])
