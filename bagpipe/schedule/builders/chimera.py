"""Chimera: two pipes in opposite directions over the same ranks, half of the micro-batches each (Li and Hoefler 2021).

Rank r holds stage r of pipe 0 (down) and stage P - 1 - r of pipe 1 (up). With F = B = 1 slot, a unit of P micro-batches
takes slots that never collide:

    F(stage, m)  at  stage + 2 m                    B(stage, m)  at  2 P - 1 - stage + 2 m

On a rank, the slots of the two pipes differ in parity or do not overlap in time. A unit starts every 2 P slots.
"""

from __future__ import annotations

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.ir.stage_graph import StageGraph, dense_program


def chimera(graph: StageGraph, chunks: int) -> Program:
    """P stages on P ranks. P and M must be even; an action's index counts the M / 2 micro-batches of its pipe."""
    ranks, micro = graph.num_stages, graph.microbatches
    for what, number in (("stages", ranks), ("micro-batches", micro)):
        if number % 2:
            raise ScheduleError(f"chimera: {what} must be a multiple of 2, got {number}")
    rows = []
    for rank in range(ranks):
        slots: list[tuple[int, Action]] = []
        for pipe, stage in enumerate((rank, ranks - 1 - rank)):
            for index in range(micro // 2):
                unit, position = divmod(index, ranks // 2)
                first = 2 * ranks * unit + 2 * position
                slots.append((first + stage, Action(stage, "F", index, pipe=pipe)))
                slots.append((first + 2 * ranks - 1 - stage, Action(stage, "B", index, pipe=pipe)))
        rows.append([action for _, action in sorted(slots, key=lambda slot: slot[0])])
    return dense_program(graph, rows, num_pipes=2)
