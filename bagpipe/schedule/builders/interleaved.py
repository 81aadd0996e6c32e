"""Interleaved 1F1B: v stages per rank in a loop, micro-batches in rounds (Narayanan et al. 2021, Megatron-LM).

A round of G micro-batches (G = P where P divides M) runs through a rank's first stage, then its second, …; backwards
start with the last stage. Smaller stages fill and drain sooner: the bubble is 1/v of 1F1B's.
"""

from __future__ import annotations

from bagpipe.errors import ScheduleError
from bagpipe.schedule.builders.row import Row
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program

__all__ = ["loop_turns", "round_size"]


def interleaved(graph: StageGraph, chunks: int) -> Program:
    """Stage s on rank s mod P. M must be a multiple of the number of rounds, ``max(1, M // P)``."""
    ranks, size = graph.num_stages // chunks, round_size("interleaved", graph, chunks)
    rows = [Row() for _ in range(ranks)]
    for rank, row in enumerate(rows):
        forwards, backwards = loop_turns(graph, chunks, rank, size)
        ahead = min(len(forwards), (chunks - 1) * size + 2 * (ranks - 1 - rank))
        for turn in range(len(forwards) + ahead):
            if turn < len(forwards):
                row.add(forwards[turn], "F")
            if turn >= ahead:
                row.add(backwards[turn - ahead], "B")
    return dense_program(graph, [row.actions for row in rows])


def round_size(name: str, graph: StageGraph, chunks: int) -> int:
    """Micro-batches of a round: there are ``max(1, M // P)`` equal rounds.

    Raises:
        ScheduleError: M is no multiple of the number of rounds; the message begins with the schedule's name.
    """
    ranks, micro = graph.num_stages // chunks, graph.microbatches
    rounds = max(1, micro // ranks)
    if micro % rounds:
        raise ScheduleError(
            f"{name}: micro-batches must be a multiple of {rounds}, the number of rounds that {ranks} ranks make "
            f"of them, such as {rounds * ranks} or {rounds * (ranks + 1)}; got {micro}"
        )
    return micro // rounds


def loop_turns(graph: StageGraph, chunks: int, rank: int, size: int) -> tuple[list[int], list[int]]:
    """Stages of a rank's forwards and of its backwards, in order, with rounds of `size` micro-batches."""
    ranks = graph.num_stages // chunks
    forwards = [rank + ranks * (turn // size % chunks) for turn in range(chunks * graph.microbatches)]
    last = rank + ranks * (chunks - 1)
    return forwards, [last + rank - stage for stage in forwards]
