"""Stages, schedule and rank mesh of a job's dense pipeline, from its configuration.

pipeline.* ─> split(model) ─> StagedModel ─┬─> step_program ─> Mesh of the job's ranks ─> example shares for the cacher
                                            └─> DensePipeline of this rank, linked to the others
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bagpipe.config.pipeline_rules import configured_schedule
from bagpipe.config.sections import Config, PipelineConfig
from bagpipe.dense.compiler import check_compiler
from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.dense.precision import Precision
from bagpipe.dense.stage_module import prepared
from bagpipe.distributed.interface import RankGroup, StageLinks
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.models.torchrec_models import num_dense_inputs
from bagpipe.pipeline.order_log import OrderLog
from bagpipe.pipeline.stage.mesh import Mesh, held_stages
from bagpipe.schedule.formats.order_text import Orders, OrderShape
from bagpipe.schedule.formats.torch_csv import table_schedule
from bagpipe.schedule.ir.backward_shares import BackwardShares, backward_shares
from bagpipe.schedule.lowering.step_program import step_program
from bagpipe.schedule.registry import ASYNCHRONOUS_SCHEDULES, dense_schedule
from bagpipe.schedule.schedule import DenseSchedule, DynamicSchedule
from bagpipe.split.assignment import graph_stages
from bagpipe.split.batch_dependence import batch_dependent_operators
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import split_parts, trace_parts
from bagpipe.split.staged_model import StagedModel
from bagpipe.split.trace import batch_dependent_modules
from bagpipe.training.agreement import needs_agreement
from bagpipe.types.schema import DataSchema
from bagpipe.util.documents import file_text
from trainer.dense import precision_of
from trainer.optimizers import clip_of
from trainer.orders import model_hash, read_orders
from trainer.precondition import layered_ranks, preconditioning_of, stage_costs
from trainer.recompute import recomputed_shares
from trainer.shards import check_holders, open_stage_shards, open_step_groups

__all__ = ["OpenStages", "StagedJob", "check_dynamic", "check_ranks", "has_losses", "open_stages", "stage_model"]

#: Schedule of a job that has micro-batches but no schedule: one stage, forward and backward per micro-batch.
_ONE_STAGE = "1f1b"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedJob:
    """A model in stages, and the ranks that run them.

    Attributes:
        staged: the stages.
        mesh: their ranks.
        shape: of orders that the lanes choose; None: the schedule has an order.
        orders: those that the job repeats.
        recomputed: by stage, the share of its micro-batches that is recomputed; empty: all or none.
        backward_shares: which backwards are left out; None: none.
    """

    staged: StagedModel
    mesh: Mesh
    shape: OrderShape | None = None
    orders: Orders | None = None
    recomputed: Mapping[int, float] = field(default_factory=dict)
    backward_shares: BackwardShares | None = None

    def order_log(self, rank: int, *, records: bool) -> OrderLog | None:
        """The orders of a rank's lanes; None: the schedule has an order."""
        if self.shape is None:
            return None
        step = self.mesh.step
        replica, process = self.mesh.coordinates(rank)
        return OrderLog(
            lanes={lane: int(lane.removeprefix("compute")) for lane in step.lanes_of(process)},
            replica=replica,
            num_actions=2 * self.shape.graph.microbatches,
            orders=self.orders,
            records=records,
        )


def stage_model(model: nn.Module, data: DataSchema, config: Config, world_size: int) -> StagedJob | None:
    """Split a model into stages. None if it is trained whole.

    Args:
        model: with converted embedding collections.
        data: columns of the data.
        config: the job.
        world_size: number of ranks.

    Raises:
        InputError: the model cannot be split this way, its examples depend on each other, or the number of ranks is
            not a multiple of the pipeline ranks.
    """
    pipeline = config.pipeline
    if not pipeline.is_staged:
        return None
    if _is_divided(pipeline):
        _check_independent_examples(batch_dependent_modules(model), pipeline)
    if pipeline.rows_delay:
        _check_statistics(batch_dependent_modules(model), "pipeline.rows_delay must be 0", "1")
    if config.run.nonfinite == "skip" and pipeline.schedule in ASYNCHRONOUS_SCHEDULES:
        _check_statistics(batch_dependent_modules(model), "run.nonfinite must be stop", "skip")
    schedule, num_ranks = check_ranks(pipeline, world_size)
    precision = precision_of(config.run)
    staged = _split(model, data, config, precision, is_chain=schedule.linear)
    if _is_divided(pipeline):
        # Dependence is tested numerically, in the parameters' dtype: autocast's rounding could look like dependence.
        full = Precision(device_type=precision.device_type)
        plain = staged if precision == full else _split(model, data, config, full, is_chain=schedule.linear)
        _check_independent_examples(batch_dependent_operators(plain), pipeline)
    replicas = world_size // num_ranks or 1
    recompute = recomputed_shares(config, staged, schedule, precision, replicas=replicas)
    step = step_program(
        staged.graph(pipeline.micro_per_stage),
        staged.embedding_edges,
        schedule,
        chunks=pipeline.chunks or None,
        num_processes=num_ranks if world_size > 1 else 1,
        replicas=replicas,
        stage_replicas=pipeline.stage_replicas,
        recompute=recompute,
        rows_delay=pipeline.rows_delay,
        shards=config.dense.shard in ("optimizer", "gradients"),
        gathers=config.dense.shard == "parameters",
        agrees=needs_agreement(clip_of(config.optim), skips=config.run.nonfinite == "skip"),
        **_preconditioning(staged, config, replicas),
    )
    if config.run.compile:
        check_compiler(torch.device(config.run.device))
    saves_all = not all(lags.is_same for lags in step.version_lags.values())
    staged = prepared(staged, precision, compiles=config.run.compile, saves_all=saves_all)
    mesh = Mesh(step=step, world_size=world_size)
    check_holders(config.dense, mesh)
    shape = None
    if isinstance(schedule, DynamicSchedule):
        limits = schedule.limits(step.graph)
        shape = OrderShape(
            graph=step.graph,
            replicas=mesh.num_replicas,
            model=model_hash(staged),
            limits=limits,
            stage_replicas=pipeline.stage_replicas,
        )
    orders = None if shape is None else read_orders(pipeline, shape)
    recomputed = {} if isinstance(recompute, bool) else recompute
    return StagedJob(
        staged=staged,
        mesh=mesh,
        shape=shape,
        orders=orders,
        recomputed=recomputed,
        backward_shares=_backward_shares(config, mesh),
    )


def _backward_shares(config: Config, mesh: Mesh) -> BackwardShares | None:
    """The rule of partial backwards; None: every backward is whole."""
    pipeline, step = config.pipeline, mesh.step
    if not pipeline.partial_shares:
        return None
    return backward_shares(
        pipeline.partial_shares,
        step.graph.order,
        microbatches=step.program.micro_per_batch[0] if pipeline.backward_unit == "microbatch" else None,
        pipes=step.num_pipes,
        replicas=mesh.num_replicas,
        seed=config.run.seed,
    )


def _split(model: nn.Module, data: DataSchema, config: Config, precision: Precision, *, is_chain: bool) -> StagedModel:
    """Stage modules, and the values between them with their dtypes in this precision."""
    with precision.autocast():
        parts = trace_parts(model, num_dense=num_dense_inputs(data), dtype=TORCH_DTYPE[config.run.dtype])
    return split_parts(parts, stages=_partition(parts, config.pipeline, is_chain=is_chain))


def _preconditioning(staged: StagedModel, config: Config, replicas: int) -> dict[str, Any]:
    """Second-order work of the program, and its costs; empty: there is none."""
    if config.optim.precondition == "none":
        return {}
    num_examples = max(1, config.data.batch_size // (replicas * config.pipeline.microbatches))
    fits = config.optim.kfac_placement == "bubbles" and config.pipeline.schedule != "dynamic"  # whose gaps nobody knows
    costs = stage_costs(staged, num_examples, fits=fits)
    return {"preconditioning": preconditioning_of(staged, config.optim), "costs": costs}


def check_ranks(pipeline: PipelineConfig, world_size: int) -> tuple[DenseSchedule, int]:
    """The schedule, and the number of its ranks that are processes of their own where the job has several.

    Raises:
        InputError: the number of ranks is not a multiple of the pipeline ranks, or the schedule cannot be loaded.
    """
    schedule = _schedule(pipeline)
    num_ranks = sum(pipeline.stage_replicas) or schedule.num_ranks(pipeline.stages, pipeline.chunks or None)
    if pipeline.processes == "1":
        return schedule, 1
    if world_size > 1 and world_size % num_ranks:
        raise InputError(
            f"pipeline.stages: {schedule.name} with {pipeline.stages} stages runs on {num_ranks} pipeline ranks, so "
            f"the job must have 1 rank or a multiple of {num_ranks}, got {world_size} (any, with pipeline.processes 1)"
        )
    return schedule, num_ranks


def check_dynamic(config: Config, world_size: int) -> None:
    """Raise InputError where ranks cannot choose the order of their actions."""
    if world_size > 1 and config.pipeline.schedule == "dynamic" and config.run.device.startswith("cuda"):
        raise InputError(
            f"pipeline.schedule dynamic with {world_size} ranks needs run.device cpu: a lane cannot see what a device "
            f"has received, got {config.run.device}"
        )


def has_losses(stages: StagedJob | None, rank: int) -> bool:
    """Whether a rank computes every loss of the model."""
    if stages is None:
        return True
    step = stages.mesh.step
    shared = {instance.stage for instance in step.instances if instance.parts > 1 and step.num_processes > 1}
    heads = [number for number, stage in enumerate(stages.staged.stages) if stage.heads]
    return all(rank in stages.mesh.holders(number) and number not in shared for number in heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStages:
    """The ranks of a pipeline, connected.

    Attributes:
        held: the stages and the ranks that hold them.
        links: to the other ranks of a replica; None: there are none.
        reduce: sums a stage's gradients over its holders.
        shares: this rank's shares of the stages that are divided among their holders.
        groups: of the ranks that hold the same stages, by ascending ranks.
        layered: group of the ranks that hold layers of K-FAC, which adds up over stages; None: there are not several.
        ranks: group of all ranks, which agree on a batch; None: their steps do not depend on each other.
    """

    held: tuple[HeldStage, ...] = ()
    links: StageLinks | None = None
    reduce: Callable[[int, Collection[int] | None], None] | None = None
    shares: Mapping[int, StageShare] = field(default_factory=dict)
    groups: Mapping[tuple[int, ...], RankGroup] = field(default_factory=dict)
    layered: RankGroup | None = None
    ranks: RankGroup | None = None


def open_stages(stages: StagedJob | None, peers: TorchPeers, config: Config) -> OpenStages:
    """Connect the ranks of a pipeline. Divides its stages if that is configured; all ranks call it alike.

    Raises:
        InputError: the model cannot be divided.
        PeerError: the ranks cannot reach each other.
    """
    if stages is None:
        return OpenStages()
    held = held_stages(stages.staged, stages.mesh)
    num_processes = stages.mesh.step.num_processes
    links = peers.open_links(num_processes) if num_processes > 1 else None
    layered = layered_ranks(stages.staged, stages.mesh) if config.optim.precondition == "kfac" else ()
    every: tuple[int, ...] = ()
    if needs_agreement(clip_of(config.optim), skips=config.run.nonfinite == "skip"):
        every = tuple(range(peers.world_size))
    groups = peers.open_stage_groups([*(stage.holders for stage in held), layered, every])
    dense = config.dense
    if dense.shard == "none":
        return OpenStages(
            held=held,
            links=links,
            reduce=StageSums(held, groups, rank=peers.rank).reduce,
            groups=groups,
            layered=groups.get(layered),
            ranks=groups.get(every),
        )
    steps = open_step_groups(config.optim, held, peers)
    shares = open_stage_shards(stages.staged.model, dense, held, groups, peers.rank, steps)
    return OpenStages(
        held=held, links=links, shares=shares, groups=groups, layered=groups.get(layered), ranks=groups.get(every)
    )


def _is_divided(pipeline: PipelineConfig) -> bool:
    """Whether a stage computes a batch in pieces: micro-batches, or parts on several ranks."""
    return pipeline.microbatches > 1 or bool(pipeline.replicas)


def _check_independent_examples(mixing: tuple[str, ...], pipeline: PipelineConfig) -> None:
    """Raise InputError if examples depend on each other: pieces of a batch would change the result."""
    if mixing:
        rule, given = "microbatches must be 1", str(pipeline.microbatches)
        if pipeline.microbatches == 1:
            rule, given = "replicas must be empty", pipeline.replicas
        raise InputError(f"pipeline.{rule} for a model whose examples depend on each other ({mixing[0]}), got {given}")


def _check_statistics(mixing: tuple[str, ...], rule: str, got: str) -> None:
    """Raise InputError if forwards change the model: those of a batch precede the end of the batch before."""
    if mixing:
        raise InputError(
            f"{rule} for a model that keeps statistics of batches ({mixing[0]}): between two batches they would be "
            f"those of the next one, got {got}"
        )


def _schedule(pipeline: PipelineConfig) -> DenseSchedule:
    if not pipeline.schedule.endswith(".csv"):
        return dense_schedule(_ONE_STAGE) if pipeline.schedule == "none" else configured_schedule(pipeline)
    return table_schedule(pipeline.schedule, file_text(pipeline.schedule, subject="pipeline.schedule"))


def _partition(parts: ModelParts, pipeline: PipelineConfig, *, is_chain: bool) -> int | dict[str, int]:
    """Number of stages of a chain, or the stage of each named module or operator."""
    if pipeline.partition == "auto":
        if is_chain:
            return pipeline.stages
        return graph_stages(parts, pipeline.stages, pipeline.microbatches)
    named = {}
    for part in pipeline.partition.split(","):
        name, _, stage = part.partition("=")
        if name in named:
            raise InputError(f"pipeline.partition names {name} twice")
        named[name] = int(stage)
    if set(named.values()) != set(range(pipeline.stages)):
        raise InputError(
            f"pipeline.partition must use the stages 0 to {pipeline.stages - 1} (pipeline.stages), "
            f"got {sorted(set(named.values()))}"
        )
    return named
