"""Chimera: two pipes in opposite directions over the same ranks (Li and Hoefler 2021).

Rank r holds stage r of pipe 0 (down) and stage P - 1 - r of pipe 1 (up). A unit of the schedule has P forward slots on
every rank, P / 2 per pipe, and takes slots that never collide:

    F(stage, m)  at  stage + 2 m                    B(stage, m)  at  2 P - 1 - stage + 2 m

On a rank, the slots of the two pipes differ in parity or do not overlap in time.

    chimera           one micro-batch per forward slot: ranks wait between units unless F = B; a unit takes 2 P slots
    chimera-doubling  two micro-batches per forward slot, one per backward slot: unless B = 2F; 3 P slots
    chimera-halving   the same with every micro-batch cut in two halves: half the waiting, and no more memory
"""

from __future__ import annotations

import dataclasses

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def chimera(graph: StageGraph, chunks: int) -> Program:
    """P stages on P ranks. P and M must be even; an action's index counts the M / 2 micro-batches of its pipe."""
    _check_even("chimera", graph)
    return _two_pipes(graph, per_forward=1)


def chimera_doubling(graph: StageGraph, chunks: int) -> Program:
    """P stages on P ranks; two forwards in succession per slot. P and M must be even; M = 2P fills a unit."""
    _check_even("chimera-doubling", graph)
    return _two_pipes(graph, per_forward=2)


def chimera_halving(graph: StageGraph, chunks: int) -> Program:
    """P stages on P ranks; an action's index counts the M halves of its pipe's M / 2 micro-batches. P must be even."""
    halves = dataclasses.replace(graph, micro_per_batch=tuple(2 * count for count in graph.micro_per_batch))
    _check_even("chimera-halving", halves)
    return _two_pipes(halves, per_forward=2)


def _check_even(name: str, graph: StageGraph) -> None:
    for what, number in (("stages", graph.num_stages), ("micro-batches", graph.microbatches)):
        if number % 2:
            raise ScheduleError(f"{name}: {what} must be a multiple of 2, got {number}")


def _two_pipes(graph: StageGraph, *, per_forward: int) -> Program:
    """Rows with `per_forward` micro-batches per forward slot and one per backward slot."""
    ranks = graph.num_stages
    rows = []
    for rank in range(ranks):
        slots: list[tuple[int, Action]] = []
        for pipe, stage in enumerate((rank, ranks - 1 - rank)):
            for index in range(graph.microbatches // 2):
                unit, position = divmod(index, per_forward * ranks // 2)
                first = (1 + per_forward) * ranks * unit
                slots.append((first + stage + 2 * (position // per_forward), Action(stage, "F", index, pipe=pipe)))
                slots.append((first + 2 * ranks - 1 - stage + 2 * position, Action(stage, "B", index, pipe=pipe)))
        rows.append([action for _, action in sorted(slots, key=lambda slot: slot[0])])
    return dense_program(graph, rows, num_pipes=2)
