"""Step counts of PyTorch's own simulator: every action takes one step, SEND and RECV included.

In each step the lanes, one after the other, do their next action if its requirements are done; a lane that could not
gets a second attempt after all others. So a RECV can share the step of its SEND, and an action that of its RECV if that
is on another lane. The count is not a time; it serves to compare lowered tables.
"""

from __future__ import annotations

import dataclasses

from bagpipe.schedule.ir.graph import Graph
from bagpipe.schedule.ir.program import Program

__all__ = ["torch_steps"]


def torch_steps(program: Program) -> int:
    """Number of steps until all actions are done.

    Args:
        program: with SEND and RECV, which define the dependencies together with lane order.

    Raises:
        ScheduleError: the program deadlocks.
    """
    graph = Graph(dataclasses.replace(program, edges=()))
    graph.order()
    place = list(graph.first_nodes)
    ends = [*graph.first_nodes[1:], len(graph.actions)]
    done = [False] * len(graph.actions)

    def try_next(lane: int) -> bool:
        node = place[lane]
        if not all(done[predecessor.node] for predecessor in graph.predecessors[node]):
            return False
        done[node] = True
        place[lane] += 1
        return True

    steps = 0
    while True:
        active = [lane for lane, node in enumerate(place) if node < ends[lane]]
        if not active:
            return steps
        steps += 1
        for lane in [lane for lane in active if not try_next(lane)]:
            try_next(lane)
