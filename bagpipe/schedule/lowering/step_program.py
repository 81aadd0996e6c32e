"""`step_program`: from a dense schedule to what the processes of a replica run for a batch.

compute0   X_EMBED  F0 F1 B0 …  X_EMBED_GRAD  OPT      lane of pipeline rank 0; RECV and SEND between processes
compute1            F0 B0 …                   OPT
reduce0                          REDUCE_GRAD  UNSHARD  lane of process 0, if several ranks hold its stages; UNSHARD if
                                                       they divide them, and RESHARD if they divide the parameters
recv2                                                  RECVs, where compute lanes choose their order (`receives`)

With `agrees`, X_MEASURE and X_AGREE come before the OPTs (`agreement`). With second-order work, COV_A, COV_G, X_INV and
PRECOND are in the compute lanes, and its exchanges in the reduce lanes (`precondition`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bagpipe.errors import ScheduleError
from bagpipe.schedule.analysis.check import check
from bagpipe.schedule.analysis.costs import Costs
from bagpipe.schedule.builders.asynchronous import drained
from bagpipe.schedule.builders.one_f_one_b import one_f_one_b
from bagpipe.schedule.ir.loop import Template
from bagpipe.schedule.ir.program import Program, Resource
from bagpipe.schedule.ir.stage_graph import StageGraph
from bagpipe.schedule.ir.step_program import StepProgram
from bagpipe.schedule.ir.version_lags import VersionLags, version_lags
from bagpipe.schedule.lowering.agreement import add_agreement
from bagpipe.schedule.lowering.embedding import add_embedding, embedding_stages, stage_instances
from bagpipe.schedule.lowering.gathers import ACTIVE_STAGES, add_gathers
from bagpipe.schedule.lowering.optimizer import add_optimizer, add_reduce_grad, add_unshard, reduce_lane
from bagpipe.schedule.lowering.precondition import Preconditioning, add_preconditioning
from bagpipe.schedule.lowering.receives import separate_receives
from bagpipe.schedule.lowering.recompute import add_recompute
from bagpipe.schedule.lowering.replicas import replicate_stages
from bagpipe.schedule.lowering.rewrite import flatten_pipes
from bagpipe.schedule.lowering.sends import add_sends
from bagpipe.schedule.lowering.turns import turn_loop, turns
from bagpipe.schedule.registry import dense_schedule
from bagpipe.schedule.schedule import AsynchronousSchedule, DenseSchedule, DynamicSchedule

__all__ = ["step_program"]


def step_program(
    graph: StageGraph,
    embedding_edges: Sequence[tuple[int, bool]],
    schedule: str | DenseSchedule,
    *,
    chunks: int | None = None,
    num_processes: int = 1,
    replicas: int = 1,
    stage_replicas: Sequence[int] = (),
    recompute: bool | Mapping[int, float] = False,
    rows_delay: int = 0,
    shards: bool = False,
    gathers: bool = False,
    active_stages: int = ACTIVE_STAGES,
    agrees: bool = False,
    preconditioning: Preconditioning | None = None,
    costs: Costs | None = None,
) -> StepProgram:
    """One batch of dense stages, ready to run.

    Args:
        graph: the stages.
        embedding_edges: (stage, whether it gives a gradient back) of the stages that the embedding stage feeds.
        schedule: a dense schedule, or its name.
        chunks: stages per rank; None: the schedule's default.
        num_processes: processes of a replica: 1, which runs all lanes, or one per pipeline rank.
        replicas: replicas of the whole pipeline.
        stage_replicas: ranks of each stage, which share its micro-batches (`replicate_stages`); empty: one each. They
            count as pipeline ranks.
        recompute: forwards keep only their inputs; activations are recomputed before the backward. Or the share of the
            micro-batches of each stage for which this holds.
        rows_delay: of an asynchronous schedule. 0: rows of a batch are read after the updates of the batch before, so a
            batch ends before the next one begins. 1: after those of the batch before that; see `turns`.
        shards: each holder of a stage steps its share of it, and then gathers the others' (`add_unshard`).
        gathers: each holder of a stage has its share of the parameters only, and gathers them for its computations
            (`add_gathers`).
        active_stages: see `add_gathers`.
        agrees: all stages agree on a batch before the first of them steps (`add_agreement`).
        preconditioning: second-order work of the stages; None: there is none.
        costs: durations by which it is put into gaps; see `cost_function`. Its actions are named as in the program.

    Raises:
        ScheduleError: no such schedule, it does not allow these stages or micro-batches, the number of processes is
            wrong, or parameters have versions and are to be divided.
    """
    found = dense_schedule(schedule) if isinstance(schedule, str) else schedule
    num_ranks = sum(stage_replicas) or found.num_ranks(graph.num_stages, chunks)
    if num_processes not in (1, num_ranks):
        raise ScheduleError(
            f"{found.name}: {num_ranks} pipeline ranks need 1 or {num_ranks} processes, got {num_processes}"
        )
    lags: Mapping[int, VersionLags] = {}
    loop = found.loop(graph, chunks) if isinstance(found, AsynchronousSchedule) else None
    _check_delay(found, graph, rows_delay)
    if loop is not None:
        order = loop if rows_delay else drained(graph, loop)
        lags = version_lags(loop)
        check(order.unroll(order.ramp()))
        dense = one_f_one_b(graph, 1)
    else:
        dense = found.build(graph, chunks)
    if dense.semantics != "sync":
        raise ScheduleError(f"{found.name}: expected a synchronous schedule, got one of semantics {dense.semantics}")
    check(dense)
    if stage_replicas:
        _check_replicated(found)
    home = {f"compute{rank}": rank if num_processes > 1 else 0 for rank in range(num_ranks)}
    program = _on_compute_lanes(dense)
    shares = recompute if isinstance(recompute, Mapping) else dict.fromkeys(range(graph.num_stages), float(recompute))
    program = add_recompute(program, shares)
    flat = replicate_stages(program, stage_replicas) if stage_replicas else flatten_pipes(program)
    program = add_embedding(flat, home, embedding_edges)
    if replicas * found.num_pipes > 1 or max(stage_replicas, default=1) > 1:
        program = add_reduce_grad(program, home)
    late = loop if rows_delay else None
    program = add_optimizer(program, home, late)
    if gathers and loop is not None:
        raise ScheduleError(
            f"{found.name}: a rank's stage computes without a pause, so parameters with versions stay whole on each of "
            f"its holders, and cannot be divided"
        )
    if gathers:
        program = add_gathers(program, home, active_stages=active_stages)
    if agrees:
        program = add_agreement(program, home)
    if preconditioning is not None:
        program = add_preconditioning(program, home, preconditioning, costs, before_steps=late is not None)
    if shards:
        program = add_unshard(program, home, late)
    home |= {reduce_lane(process): process for process in set(home.values())}
    found_stages = embedding_stages(flat, home)
    alternating: Mapping[str, tuple[Template, ...]] = {}
    if late is not None:
        alternating = turns(program, late, found_stages, home)
        together = turn_loop(program, alternating, found_stages[0])
        check(together.unroll(together.ramp()))
    program = add_sends(program, home)
    in_flight: dict[str, int] = {}
    if isinstance(found, DynamicSchedule):
        program = separate_receives(program, home)
        limits = found.limits(graph)
        in_flight = {f"compute{instance.position}": limits[instance.stage] for instance in stage_instances(flat, home)}
    check(program)
    return StepProgram(
        graph=graph,
        schedule=found.name,
        program=program,
        instances=stage_instances(flat, home),
        embedding_stages=found_stages,
        num_processes=num_processes,
        num_pipes=found.num_pipes,
        version_lags=lags,
        in_flight=in_flight,
        turns=alternating,
    )


def _check_replicated(schedule: DenseSchedule) -> None:
    if schedule.num_pipes > 1 or schedule.ranks is not None:
        raise ScheduleError(f"{schedule.name}: replicas of single stages need a schedule of one direction")


def _check_delay(schedule: DenseSchedule, graph: StageGraph, rows_delay: int) -> None:
    if rows_delay not in (0, 1):
        raise ScheduleError(
            f"rows can be read after the batch before, or the one before that: 0 or 1, got {rows_delay}"
        )
    if rows_delay and not isinstance(schedule, AsynchronousSchedule):
        raise ScheduleError(f"{schedule.name}: only an asynchronous schedule has anything to do meanwhile, got delay 1")
    if rows_delay and graph.microbatches < graph.num_stages - 1:
        raise ScheduleError(
            f"{schedule.name}: rows that are read a batch late need at least {graph.num_stages - 1} micro-batches, one "
            f"less than the stages, got {graph.microbatches}"
        )


def _on_compute_lanes(program: Program) -> Program:
    lanes = {f"compute{rank}": actions for rank, actions in enumerate(program.lanes.values())}
    return dataclasses.replace(program, lanes=lanes, resources=tuple(Resource(name=lane, kind="gpu") for lane in lanes))
