"""DualPipeV: a forward and a backward of a rank's two stages as one action, each hiding the other's communication.

Rank r holds stages r (down) and 2P - 1 - r (up). The eight phases are those of DeepSeek's DualPipe, cut in half at the
fold of the V (Sea AI Lab, DeepSeek 2025).
"""

from __future__ import annotations

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def dualpipe_v(graph: StageGraph, chunks: int) -> Program:
    """Rank r holds stages r and 2P - 1 - r. M must be at least 2P."""
    ranks, micro = graph.num_stages // 2, graph.microbatches
    if micro < graph.num_stages:
        raise ScheduleError(
            f"dualpipe-v: micro-batches must be at least {graph.num_stages}, the number of stages, got {micro}"
        )
    rows = []
    for rank in range(ranks):
        row, down, up, below = Row(), rank, graph.num_stages - 1 - rank, ranks - 1 - rank
        row.add(down, "F", 2 * below)
        for _ in range(rank + 1):
            row.add(down, "F")
            row.add(up, "F")
        row.add(up, "IWF", below)
        for turn in range(micro - 2 * ranks + rank + 1):
            if turn == 0 and below == 0:  # at the fold, separately: the backward's result leaves sooner
                row.add(down, "F")
                row.add(up, "B")
            else:
                row.overlap(down, up)
            row.overlap(up, down)
        for _ in range(below):
            row.add(up, "B")
            row.overlap(up, down)
        # Full backwards in the first half of the drain, then I and W separately: W fills the end.
        for position in range(2 * (rank + 1)):
            row.add(up if position % 2 == 0 else down, "B" if position <= rank else "I")
        for _ in range(below):
            row.weight()
            row.add(down, "I")
        for _ in range(rank + 1):
            row.weight()
        rows.append(row.actions)
    return dense_program(graph, rows)
