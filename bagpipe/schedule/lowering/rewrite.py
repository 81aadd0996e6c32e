"""Passes over compute actions: pipes, merged backwards, sharded parameters. Program -> Program.

flatten_pipes          stage s of pipe p becomes stage p * S + s
merge_input_weight     adjacent I and W become B
add_unshard_reshard    UNSHARD and RESHARD around the actions of a stage
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program

__all__ = ["add_unshard_reshard", "flatten_pipes", "merge_input_weight", "next_stages", "rewrite_lanes"]


def flatten_pipes(program: Program) -> Program:
    """Stage s of pipe p becomes stage ``p * S + s``, where S is the number of stages; it shares stage s's parameters.

    Edges and stages are repeated per pipe, and actions no longer name a pipe.

    Raises:
        ScheduleError: the stages are not numbered from 0 without a gap.
    """
    numbers = {stage.number for stage in program.stages} | {atom.stage for atom in program.atoms()}
    size = len(numbers)
    if numbers != set(range(size)):
        raise ScheduleError(f"expected stages 0 to {size - 1}, got {sorted(numbers)}")
    pipes = range(1 + max((atom.pipe for atom in program.atoms()), default=0))

    def flat(atom: Action) -> Action:
        first = atom.pipe * size
        peer = None if atom.peer is None else first + atom.peer
        return dataclasses.replace(atom, stage=first + atom.stage, peer=peer, pipe=0)

    return dataclasses.replace(
        program,
        lanes={
            lane: tuple(_rebuilt(action, [flat(atom) for atom in action.atoms]) for action in actions)
            for lane, actions in program.lanes.items()
        },
        edges=tuple(
            dataclasses.replace(edge, src_stage=pipe * size + edge.src_stage, dst_stage=pipe * size + edge.dst_stage)
            for pipe in pipes
            for edge in program.edges
        ),
        stages=tuple(
            dataclasses.replace(stage, number=pipe * size + stage.number, shares=stage.number if pipe else None)
            for pipe in pipes
            for stage in program.stages
        ),
    )


def _rebuilt(action: Action, atoms: Sequence[Action]) -> Action:
    return dataclasses.replace(action, parts=tuple(atoms)) if action.parts else atoms[0]


def merge_input_weight(program: Program) -> Program:
    """I directly followed by its own W becomes B, which can be faster than its halves."""

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        before: Action | None = None
        for action in actions:
            if before is not None and before.op == "I" and action == dataclasses.replace(before, op="W"):
                before = dataclasses.replace(before, op="B")
                continue
            if before is not None:
                yield before
            before = action
        if before is not None:
            yield before

    return rewrite_lanes(program, lowered)


def add_unshard_reshard(program: Program, max_active_stages: int = 3) -> Program:
    """UNSHARD before the first action of a stage, RESHARD when a lane holds too many stages, for sharded parameters.

    A lane holds at most the next `max_active_stages` different stages of its row (PyTorch's policy). An overlap can
    hold one more, since it counts as one action.

    Raises:
        ScheduleError: max_active_stages is below 1.
    """
    if max_active_stages < 1:
        raise ScheduleError(f"active stages must be at least 1, got {max_active_stages}")

    def lowered(actions: Iterable[Action]) -> Iterable[Action]:
        row = tuple(actions)
        active: list[int] = []
        for action, wanted in zip(row, next_stages([action.atoms for action in row], max_active_stages), strict=True):
            for stage in sorted(set(active) - set(wanted)):
                active.remove(stage)
                yield Action(stage, "RESHARD")
            for stage in wanted:
                if stage not in active:
                    active.append(stage)
                    yield Action(stage, "UNSHARD")
            yield action
        yield from (Action(stage, "RESHARD") for stage in sorted(active))

    return rewrite_lanes(program, lowered)


def next_stages(row: Sequence[Sequence[Action]], count: int) -> list[tuple[int, ...]]:
    """Per position of a row, the next `count` different stages, in order of use."""
    found: list[tuple[int, ...]] = []
    wanted: list[tuple[int, ...]] = []  # stages per following action, no stage twice
    for atoms in reversed(row):
        own = tuple(dict.fromkeys(atom.stage for atom in atoms))
        behind = [tuple(stage for stage in stages if stage not in own) for stages in wanted]
        wanted = [own, *(stages for stages in behind if stages)]
        taken: list[int] = []
        for stages in wanted:
            if len(taken) >= count:
                break
            taken += stages
        found.append(tuple(taken))
    return found[::-1]


def rewrite_lanes(
    program: Program, lowered: Callable[[Iterable[Action]], Iterable[Action]], edges: Iterable[Edge] = ()
) -> Program:
    """The program with `lowered` applied to every lane, and with more edges. Duplicate edges are dropped."""
    return dataclasses.replace(
        program,
        lanes={lane: tuple(lowered(actions)) for lane, actions in program.lanes.items()},
        edges=tuple(dict.fromkeys((*program.edges, *edges))),
    )
