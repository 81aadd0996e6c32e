"""GPipe: all forwards, then all backwards (Huang et al. 2019)."""

from __future__ import annotations

from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def gpipe(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank. Between forwards and backwards the activations of all micro-batches are alive."""
    rows = [Row() for _ in range(graph.num_stages)]
    for stage, row in enumerate(rows):
        row.add(stage, "F", graph.microbatches)
        row.add(stage, "B", graph.microbatches)
    return dense_program(graph, [row.actions for row in rows])
