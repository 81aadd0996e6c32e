"""`move_program`: a plan of moves as a program, so that it is checked, simulated and drawn as all schedules are.

    compute   0USE0  0USE1  0USE2 …           moments of a walk through the plan, in order
    chunks    2CHUNK_OUT0  1CHUNK_IN0  …      moves, in the plan's order

A move waits for the moment before it, a moment for the chunks that came for it. `simulate_moves`, by which plans are
chosen, computes the same times without a graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from bagpipe.dense.chunks.moves import Move, MovePlan
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program, Resource, Stage

__all__ = ["move_costs", "move_program"]

#: Stages of the program: what computes, chunks that come, chunks that leave.
_USE, _IN, _OUT = 0, 1, 2
_OPS = {_USE: "USE", _IN: "CHUNK_IN", _OUT: "CHUNK_OUT"}

#: Source, waiting stage and delay of an edge.
_Ends = tuple[int, int, int]


def move_program(plan: MovePlan, num_walks: int = 1) -> Program:
    """The program of some walks through a plan.

    Args:
        plan: the moves.
        num_walks: walks; a walk is `MovePlan.num_batches` batches.
    """
    num_moments = plan.num_batches * len(plan.trace)
    numbers = {stage: [k for k, move in enumerate(plan.moves) if _stage_of(move) == stage] for stage in (_IN, _OUT)}
    unit_of = {k: unit for own in numbers.values() for unit, k in enumerate(own)}
    units: dict[_Ends, list[tuple[int, int]]] = defaultdict(list)
    for k, move in enumerate(plan.moves):
        before, delay = (move.moment - 1, 0) if move.moment else (num_moments - 1, 1)
        units[_USE, _stage_of(move), delay].append((before, unit_of[k]))
        if move.to == "device":
            used = _next_use(plan, move.chunk, move.moment)
            units[_IN, _USE, used // num_moments].append((unit_of[k], used % num_moments))
    counts = {_USE: num_moments, _IN: len(numbers[_IN]), _OUT: len(numbers[_OUT])}
    moves = [
        Action(_stage_of(move), _OPS[_stage_of(move)], walk * counts[_stage_of(move)] + unit_of[k])
        for walk in range(num_walks)
        for k, move in enumerate(plan.moves)
    ]
    return Program(
        lanes={
            "compute": tuple(Action(_USE, _OPS[_USE], index) for index in range(num_walks * num_moments)),
            **({"chunks": tuple(moves)} if moves else {}),
        },
        resources=(Resource(name="compute", kind="gpu"), *([Resource(name="chunks", kind="copy")] if moves else [])),
        stages=tuple(
            Stage(number=stage, name=_OPS[stage].lower(), micro_per_batch=count)
            for stage, count in counts.items()
            if count
        ),
        edges=tuple(
            Edge(src=_OPS[src], src_stage=src, dst=_OPS[dst], dst_stage=dst, delay=delay, units=tuple(pairs))
            for (src, dst, delay), pairs in units.items()
        ),
    )


def move_costs(plan: MovePlan, compute: Sequence[float], copy: float) -> Callable[[Action], float]:
    """Durations of the actions of `move_program`.

    Args:
        plan: the moves.
        compute: time of each moment of the trace.
        copy: time of the copy of one chunk; a move without a copy takes none.
    """
    copies = {stage: [move.copies for move in plan.moves if _stage_of(move) == stage] for stage in (_IN, _OUT)}

    def cost(action: Action) -> float:
        index = action.index or 0
        if action.stage == _USE:
            return compute[index % len(plan.trace)]
        own = copies[action.stage]
        return copy if own[index % len(own)] else 0.0

    return cost


def _stage_of(move: Move) -> int:
    return _IN if move.to == "device" else _OUT


def _next_use(plan: MovePlan, chunk: int, moment: int) -> int:
    """The first moment from one on that uses a chunk, counted on into the next walk."""
    length = len(plan.trace)
    return next(at for at in range(moment, moment + length) if chunk in plan.trace[at % length].chunks)
