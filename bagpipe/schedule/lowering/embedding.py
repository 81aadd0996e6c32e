"""`add_embedding`: one embedding stage per process, which feeds the dense stages and takes gradients back.

X_EMBED  F0 F1 B0 …  X_EMBED_GRAD        on the lane where the process's first pipe begins
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program, Stage
from bagpipe.schedule.ir.step_program import EmbeddingStage, StageInstance

__all__ = ["add_embedding", "embedding_stages", "stage_instances"]


def stage_instances(program: Program, home: Mapping[str, int]) -> tuple[StageInstance, ...]:
    """The stages of a program with flat pipes and where they run, by number.

    Raises:
        ScheduleError: an action names a pipe.
    """
    size = sum(stage.shares is None for stage in program.stages)
    described = {stage.number: stage for stage in program.stages}
    found: dict[int, StageInstance] = {}
    for position, (lane, actions) in enumerate(program.lanes.items()):
        for atom in (atom for action in actions for atom in action.atoms):
            if atom.pipe:
                raise ScheduleError(f"{atom.text}: expected flat pipes; run flatten-pipes first")
            if atom.op == "F":
                own = described[atom.stage]
                found[atom.stage] = StageInstance(
                    number=atom.stage,
                    stage=own.parameters,
                    pipe=atom.stage // size if own.parts == 1 else 0,
                    position=position,
                    process=home[lane],
                    part=own.part,
                    parts=own.parts,
                )
    return tuple(found[number] for number in sorted(found))


def embedding_stages(program: Program, home: Mapping[str, int]) -> tuple[EmbeddingStage, ...]:
    """One embedding stage per process, on the lane of its first pipe's first stage; without pipes where none begins."""
    instances = stage_instances(program, home)
    fed = {edge.dst_stage for edge in program.edges if edge.src == edge.dst == "F"}
    first = {instance.pipe: instance for instance in reversed(instances) if instance.number not in fed}
    found = []
    for process in sorted({instance.process for instance in instances}):
        pipes = tuple(pipe for pipe in sorted(first) if first[pipe].process == process)
        own = min(instance.position for instance in instances if instance.process == process)
        found.append(
            EmbeddingStage(
                number=len(instances) + process,
                pipes=pipes,
                process=process,
                position=first[pipes[0]].position if pipes else own,
            )
        )
    return tuple(found)


def add_embedding(
    program: Program, home: Mapping[str, int], embedding_edges: Sequence[tuple[int, bool]] | None = None
) -> Program:
    """The program with an X_EMBED and an X_EMBED_GRAD per process.

    Args:
        program: one batch with flat pipes.
        home: lane -> the process that runs it.
        embedding_edges: (stage of the stage graph, whether it gives a gradient back) of the stages that the embedding
            stage feeds. None: gradients from stages without a producer, none from stages without a consumer, which
            take labels.

    Raises:
        ScheduleError: an action names a pipe.
    """
    instances = stage_instances(program, home)
    edges = list(program.edges)
    lanes = list(program.lanes.items())
    micro = max(stage.micro_per_batch for stage in program.stages)
    stages = list(program.stages)
    fed = _default_edges(program, instances) if embedding_edges is None else embedding_edges
    for embedding in embedding_stages(program, home):
        stages.append(Stage(number=embedding.number, name="embedding", micro_per_batch=micro))
        lane, actions = lanes[embedding.position]
        first, last = (Action(embedding.number, op, 0) for op in ("X_EMBED", "X_EMBED_GRAD"))
        lanes[embedding.position] = lane, (first, *actions, last)
        for instance in (instance for instance in instances if instance.pipe in embedding.pipes):
            for wants_grad in (wants_grad for stage, wants_grad in fed if stage == instance.stage):
                edges.append(Edge(src="X_EMBED", src_stage=embedding.number, dst="F", dst_stage=instance.number))
                if wants_grad:
                    edges.append(
                        Edge(src="I", src_stage=instance.number, dst="X_EMBED_GRAD", dst_stage=embedding.number)
                    )
    return dataclasses.replace(program, lanes=dict(lanes), edges=tuple(edges), stages=tuple(stages))


def _default_edges(program: Program, instances: Sequence[StageInstance]) -> list[tuple[int, bool]]:
    passes = [edge for edge in program.edges if edge.src == edge.dst == "F"]
    fed, feeding = {edge.dst_stage for edge in passes}, {edge.src_stage for edge in passes}
    stages = [instance.number for instance in instances if instance.pipe == 0]
    return [(stage, stage not in fed) for stage in stages if stage not in fed or stage not in feeding]
