"""Zero bubble: separate input and weight gradients; weight gradients fill idle time (Qi et al. 2024).

zb-h1  1F1B's order and memory; W fills part of the drain
zb-v   two stages per rank in a V: rank r holds stages r and 2P - 1 - r; no rank idles if F = I = W
       and M >= 2P - 1
"""

from __future__ import annotations

from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def zb_h1(graph: StageGraph, chunks: int) -> Program:
    """One stage per rank. Rank r delays r weight gradients, so every rank has ``min(M, P)`` micro-batches in flight."""
    rows = [Row() for _ in range(graph.num_stages)]
    for stage, row in enumerate(rows):
        ahead = min(graph.microbatches, graph.num_stages - 1 - stage)
        row.add(stage, "F", ahead)
        for turn in range(graph.microbatches):
            row.add(stage, "F" if turn + ahead < graph.microbatches else "")
            row.add(stage, "I")
            row.add(stage, "W" if turn >= stage else "")
        row.add(stage, "W", min(stage, graph.microbatches))
    return dense_program(graph, [row.actions for row in rows])


def zb_v(graph: StageGraph, chunks: int) -> Program:
    """Rank r holds stages r and 2P - 1 - r. A batch too small to fill the V is the beginning of one that does."""
    ranks = graph.num_stages // 2
    micro = max(2 * ranks - 1, graph.microbatches)
    rows = []
    for rank in range(ranks):
        row, down, up = Row(), rank, graph.num_stages - 1 - rank
        row.add(down, "F", 2 * (ranks - rank) - 1)
        for _ in range(rank):
            row.add(up, "F")
            row.add(down, "F")
        row.add(up, "FIW", ranks - rank)
        for turn in range(micro - ranks):
            row.add(down, "F" if turn <= micro - 2 * ranks + rank else "")
            row.add(down, "IW")
            row.add(up, "FIW")
        for _ in range(rank):
            row.add(down, "I")
            row.add(up, "I")
        row.add(down, "IW", ranks - rank)
        row.add(up, "W", rank)
        row.add(down, "W", rank)
        rows.append([action for action in row.actions if (action.index or 0) < graph.microbatches])
    return dense_program(graph, rows)
