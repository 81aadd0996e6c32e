"""Interleaved 1F1B: v stages per rank in a loop, micro-batches in rounds (Narayanan et al. 2021, Megatron-LM).

A round of G micro-batches (G = P where P divides M) runs through a rank's first stage, then its second, …; backwards
start with the last stage. Smaller stages fill and drain sooner: the bubble is 1/v of 1F1B's.
"""

from __future__ import annotations

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def interleaved(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s mod P. M must be a multiple of the number of rounds, ``max(1, M // P)``."""
    ranks, micro = graph.num_stages // chunks, graph.microbatches
    rounds = max(1, micro // ranks)
    if micro % rounds:
        raise ScheduleError(
            f"interleaved: micro-batches must be a multiple of {rounds}, the number of rounds that {ranks} ranks make "
            f"of them, such as {rounds * ranks} or {rounds * (ranks + 1)}; got {micro}"
        )
    size = micro // rounds
    rows = [Row() for _ in range(ranks)]
    for rank, row in enumerate(rows):
        stages = [rank + ranks * (turn // size % chunks) for turn in range(chunks * micro)]
        last = rank + ranks * (chunks - 1)
        ahead = min(len(stages), (chunks - 1) * size + 2 * (ranks - 1 - rank))
        for turn in range(len(stages) + ahead):
            if turn < len(stages):
                row.add(stages[turn], "F")
            if turn >= ahead:
                row.add(last + rank - stages[turn - ahead], "B")
    return dense_program(graph, [row.actions for row in rows])
