"""1F1B: some forwards ahead, then one forward and one backward in turn. The forwards ahead bound the memory.

1f1b        P - r in flight on rank r: just enough to keep the last stage busy (PipeDream-Flush, DAPPLE)
eager-1f1b  2 (P - r) - 1 in flight: one more forward per hop hides the hop's latency (Zhuang et al. 2023)
"""

from __future__ import annotations

from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def one_f_one_b(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank; ``min(M, P - r)`` micro-batches in flight on rank r."""
    return _alternating(graph, hop=1)


def eager_one_f_one_b(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank; ``min(M, 2 (P - r) - 1)`` micro-batches in flight on rank r."""
    return _alternating(graph, hop=2)


def _alternating(graph: StageGraph, hop: int) -> Program:
    """1F1B with `hop` forwards ahead for every rank between this one and the last."""
    rows = [Row() for _ in range(graph.num_stages)]
    for stage, row in enumerate(rows):
        ahead = min(graph.microbatches, hop * (graph.num_stages - 1 - stage))
        row.add(stage, "F", ahead)
        row.add(stage, "FB", graph.microbatches - ahead)
        row.add(stage, "B", ahead)
    return dense_program(graph, [row.actions for row in rows])
