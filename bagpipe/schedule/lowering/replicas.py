"""`replicate_stages`: stages on different numbers of ranks, each rank with its part of every micro-batch.

    stage 0 on 2 ranks, stage 1 on 1, two micro-batches          examples of a batch
    compute0   0F0    0F1    …   (stage 0, part 0)               micro-batch   0           1
    compute1   2F0    2F1    …   (stage 0, part 1)               stage 0       part 0, 1   part 0, 1
    compute2       1F0    1F1    (stage 1)                       stage 1       whole       whole

Part r of n of micro-batch m out of M is share ``m n + r`` of M n equal ones, so parts of different stages nest as
micro-batches do. An edge leads between two parts if they have examples in common in some micro-batch: its messages are
those examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Program, Resource, overlapping_units

__all__ = ["replicate_stages"]


def replicate_stages(program: Program, replicas: Sequence[int]) -> Program:
    """The program with ``replicas[s]`` instances of stage s, each on a lane of its own.

    Part 0 of a stage keeps the stage's number. The others are numbered after all stages, by stage and part, and share
    its parameters. The lanes are ``compute0``, ``compute1``, … by stage and part.

    Args:
        program: one batch of compute actions, every lane with one stage, without pipes.
        replicas: by stage.

    Raises:
        ScheduleError: not one number of at least 1 per stage, or a lane with several stages.
    """
    if len(replicas) != len(program.stages) or min(replicas) < 1:
        raise ScheduleError(
            f"expected {len(program.stages)} numbers of replicas, one of at least 1 per stage, got {list(replicas)}"
        )
    rows: dict[int, tuple[Action, ...]] = {}
    for lane, actions in program.lanes.items():
        stages = {atom.stage for action in actions for atom in action.atoms}
        if len(stages) != 1 or any(atom.pipe for action in actions for atom in action.atoms):
            raise ScheduleError(f"stages with replicas of their own need one stage per rank, got {lane} with {stages}")
        rows[stages.pop()] = actions
    numbers = {(stage, 0): stage for stage in range(len(replicas))}
    for stage, count in enumerate(replicas):
        numbers |= {(stage, part): len(numbers) + part - 1 for part in range(1, count)}
    placed = [(stage, part) for stage, count in enumerate(replicas) for part in range(count)]
    micro = program.micro_per_batch
    lanes = {
        f"compute{position}": tuple(_renumbered(action, numbers[place]) for action in rows[place[0]])
        for position, place in enumerate(placed)
    }
    edges = [
        dataclasses.replace(edge, src_stage=numbers[source], dst_stage=numbers[target])
        for edge in program.edges
        for source in placed
        for target in placed
        if (source[0], target[0]) == (edge.src_stage, edge.dst_stage)
        and (source == target if source[0] == target[0] else _meet(source, target, micro, replicas))
    ]
    return dataclasses.replace(
        program,
        lanes=lanes,
        edges=tuple(edges),
        stages=tuple(
            dataclasses.replace(
                stage,
                number=numbers[stage.number, part],
                shares=stage.number if part else None,
                part=part,
                parts=replicas[stage.number],
            )
            for stage in program.stages
            for part in range(replicas[stage.number])
        ),
        resources=tuple(Resource(name=lane, kind="gpu") for lane in lanes),
    )


def _renumbered(action: Action, number: int) -> Action:
    if action.parts:
        return dataclasses.replace(action, parts=tuple(_renumbered(part, number) for part in action.parts))
    return dataclasses.replace(action, stage=number)


def _meet(source: tuple[int, int], target: tuple[int, int], micro: Mapping[int, int], replicas: Sequence[int]) -> bool:
    """Whether two parts, (stage, part) each, have examples in common in some micro-batch."""
    (first, part), (second, other) = source, target
    units, others = micro[first] * replicas[first], micro[second] * replicas[second]
    return any(
        share % replicas[second] == other
        for unit in range(part, units, replicas[first])
        for share in overlapping_units(unit, units, others)
    )
