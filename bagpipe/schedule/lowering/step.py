"""From a schedule to what runs: `step_program` adds to a builder's rows all that a training step is besides them.

compute0: X_EMBED  F0 F1 B0 …  X_EMBED_GRAD  OPT     embedding stage on the lane where its pipe begins
compute1:         F0 B0 …               OPT     SEND and RECV between lanes of different processes
reduce:                       REDUCE_GRAD       sums over the ranks that hold the same stage, on a lane of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.ir.actions import Action
from bagpipe.schedule.ir.program import Edge, Program, Resource, Stage
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.ir.step_program import EmbeddingStage, StageInstance, StepProgram
from bagpipe.schedule.lowering.passes import add_recompute, add_sends, flatten_pipes
from bagpipe.schedule.registry import DenseSchedule, dense_schedule

__all__ = ["step_program"]


def step_program(
    graph: StageGraph,
    embedding_edges: Sequence[tuple[int, bool]],
    schedule: str | DenseSchedule,
    *,
    chunks: int | None = None,
    num_processes: int = 1,
    replicas: int = 1,
    recompute: bool = False,
) -> StepProgram:
    """One batch of dense stages, ready to run.

    Args:
        graph: the stages.
        embedding_edges: (stage, whether it gives a gradient back) of the stages that the embedding stage feeds.
        schedule: a dense schedule, or the name of one.
        chunks: stages per rank; None: the schedule's own number.
        num_processes: of a replica: 1, which runs all lanes, or one per pipeline rank.
        replicas: replicas of the whole pipeline.
        recompute: forwards keep their inputs only; activations are computed again before the backward.

    Raises:
        ScheduleError: no such schedule, it does not allow these stages or micro-batches, or the processes do not fit.
    """
    found = dense_schedule(schedule) if isinstance(schedule, str) else schedule
    num_ranks = found.num_ranks(graph.num_stages, chunks)
    if num_processes not in (1, num_ranks):
        raise ScheduleError(
            f"{found.name}: {num_ranks} pipeline ranks need 1 or {num_ranks} processes, got {num_processes}"
        )
    dense = found.build(graph, chunks)
    check(dense)
    home = {f"compute{rank}": rank if num_processes > 1 else 0 for rank in range(num_ranks)}
    instances = _instances(dense, graph, home)
    if recompute:
        dense = add_recompute(dense, range(graph.num_stages))
    flat = flatten_pipes(dense)
    embedding_stages = _embedding_stages(graph, instances, found.num_pipes)
    program = _with_optimizer(
        _with_embedding_stages(flat, embedding_stages, instances, embedding_edges), instances, replicas
    )
    program = _pools_first(add_sends(program, {**home, **{_reduce_lane(p): p for p in set(home.values())}}))
    check(program)
    return StepProgram(
        graph=graph,
        schedule=found.name,
        program=program,
        instances=instances,
        embedding_stages=embedding_stages,
        num_processes=num_processes,
        num_pipes=found.num_pipes,
    )


def _instances(dense: Program, graph: StageGraph, home: dict[str, int]) -> tuple[StageInstance, ...]:
    """Where every (pipe, stage) runs, by its number ``pipe * num_stages + stage``."""
    positions = {
        (atom.pipe, atom.stage): position
        for position, actions in enumerate(dense.lanes.values())
        for action in actions
        for atom in action.atoms
    }
    return tuple(
        StageInstance(
            number=pipe * graph.num_stages + stage,
            stage=stage,
            pipe=pipe,
            position=position,
            process=home[f"compute{position}"],
        )
        for (pipe, stage), position in sorted(positions.items())
    )


def _embedding_stages(
    graph: StageGraph, instances: tuple[StageInstance, ...], num_pipes: int
) -> tuple[EmbeddingStage, ...]:
    """One embedding stage per process, at the first stage of its first pipe; without pipes where none begins."""
    first = {instance.pipe: instance for instance in instances if instance.stage == graph.order[0]}
    found = []
    for process in range(1 + max(instance.process for instance in instances)):
        pipes = tuple(pipe for pipe in range(num_pipes) if first[pipe].process == process)
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


def _with_embedding_stages(
    flat: Program,
    embedding_stages: tuple[EmbeddingStage, ...],
    instances: tuple[StageInstance, ...],
    embedding_edges: Sequence[tuple[int, bool]],
) -> Program:
    lanes = {f"compute{number}": actions for number, actions in enumerate(flat.lanes.values())}
    edges, stages = list(flat.edges), list(flat.stages)
    micro = max(stage.micro_per_batch for stage in stages)
    for embedding in embedding_stages:
        stages.append(Stage(number=embedding.number, name="embedding", micro_per_batch=micro))
        lane = f"compute{embedding.position}"
        lanes[lane] = (
            Action(embedding.number, "X_EMBED", 0),
            *lanes[lane],
            Action(embedding.number, "X_EMBED_GRAD", 0),
        )
        for instance in instances:
            for stage, wants_grad in embedding_edges:
                if instance.pipe in embedding.pipes and instance.stage == stage:
                    edges.append(Edge(src="X_EMBED", src_stage=embedding.number, dst="F", dst_stage=instance.number))
                    if wants_grad:
                        edges.append(
                            Edge(src="I", src_stage=instance.number, dst="X_EMBED_GRAD", dst_stage=embedding.number)
                        )
    return Program(
        lanes=lanes,
        edges=tuple(edges),
        stages=tuple(stages),
        resources=tuple(Resource(name=lane, kind="gpu") for lane in lanes),
    )


def _with_optimizer(program: Program, instances: tuple[StageInstance, ...], replicas: int) -> Program:
    """OPT once per stage and process; where others hold the stage too, REDUCE_GRAD before it."""
    lanes, edges = dict(program.lanes), list(program.edges)
    reduces: dict[str, list[Action]] = {}
    holders: dict[tuple[int, int], list[StageInstance]] = {}
    for instance in instances:
        holders.setdefault((instance.process, instance.stage), []).append(instance)
    num_pipes = 1 + max(instance.pipe for instance in instances)
    for (process, _), own in sorted(holders.items(), key=lambda holder: (holder[0][0], holder[1][0].stage)):
        first = own[0]
        taker = "OPT"
        if replicas * num_pipes > 1:
            taker = "REDUCE_GRAD"
            reduces.setdefault(_reduce_lane(process), []).append(Action(first.number, taker, 0))
            edges.append(Edge(src=taker, src_stage=first.number, dst="OPT", dst_stage=first.number))
        # A full backward counts as W.
        edges += [Edge(src="W", src_stage=instance.number, dst=taker, dst_stage=first.number) for instance in own]
        lane = f"compute{first.position}"
        lanes[lane] = (*lanes[lane], Action(first.number, "OPT", 0))
        for other in own[1:]:  # the other pipe's instance, in another lane of this process, uses the same weights
            edges.append(Edge(src="OPT", src_stage=first.number, dst="F", dst_stage=other.number, delay=1))
    return Program(
        lanes={**lanes, **{lane: tuple(actions) for lane, actions in reduces.items()}},
        edges=tuple(edges),
        stages=program.stages,
        resources=(*program.resources, *(Resource(name=lane, kind="copy") for lane in reduces)),
    )


def _pools_first(program: Program) -> Program:
    """A lane's X_EMBED before its first RECV: it tells the lane that there is such a batch."""
    lanes = {
        lane: tuple(sorted(actions, key=lambda action: action.op != "X_EMBED"))
        for lane, actions in program.lanes.items()
    }
    return replace(program, lanes=lanes)


def _reduce_lane(process: int) -> str:
    return f"reduce{process}"
