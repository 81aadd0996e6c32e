"""Builds the parts of a job from its configuration. Opens no connection or file.

config, data schema ──build_training_model──> BuiltModel: model, row schema, oracle spec
    build_cache, build_dense, build_parts ──┐
    store opened for the row schema ──────────┴──build_engine──> Engine
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.recorder import Recorder
from bagpipe.config.row_optimizers import row_optimizers
from bagpipe.config.sections import Config
from bagpipe.dense.executor import DenseExecutor, EagerExecutor, SplitExecutor
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.dense.parallel.stage_shards import StageShare
from bagpipe.distributed.interface import Peers, RankGroup, StageLinks
from bagpipe.embedding.torchrec_collections import Converted, convert
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.select import select_kernels
from bagpipe.models.torchrec_models import build_model
from bagpipe.oracle.plan import OracleSpec
from bagpipe.pipeline.devices import open_streams
from bagpipe.pipeline.stage.chunked_stages import chunk_stages
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.trace import Trace
from bagpipe.rates import Schedule
from bagpipe.schedule.ir.program import Program
from bagpipe.schedule.schedule import AsynchronousSchedule
from bagpipe.store.interface import Store
from bagpipe.training.chunked_weights import ChunkedWeights
from bagpipe.training.dense import DensePart
from bagpipe.training.engine import Engine, EngineSettings, IsWritten
from bagpipe.training.learning_rates import LearningRates
from bagpipe.training.part import LoopPart
from bagpipe.training.plateau import PlateauFactor
from bagpipe.training.preconditioning import Preconditioning
from bagpipe.training.row_steps import row_steps_of
from bagpipe.training.serial_reference import ReferenceRules
from bagpipe.training.staged_dense import StagedDense
from bagpipe.training.verification import Verification
from bagpipe.training.weight_average import WeightAverage
from bagpipe.training.weights import GradientSum, ResidentWeights, ShardedWeights, Weights
from bagpipe.training.whole_dense import WholeDense
from bagpipe.training.whole_kfac import whole_kfac
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.cache_size import cache_rows_of
from trainer.dense import budget_of, dense_executor, graph_capture, loss_of, precision_of
from trainer.inputs import InputMaker
from trainer.metrics import metric_of
from trainer.model_check import check_expiring_tables, check_loss_weights, check_model
from trainer.optimizers import (
    clip_of,
    dense_optimizer,
    plateau_rule,
    rate_schedule,
    rows_rate_schedule,
    undecayed_parameters,
)
from trainer.precondition import kfac_settings, stage_kfacs
from trainer.stages import StagedJob, check_ranks, stage_model

__all__ = [
    "BuiltModel",
    "build_cache",
    "build_dense",
    "build_engine",
    "build_parts",
    "build_training_model",
    "engine_settings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The model of a job and everything derived from its configuration.

    Attributes:
        config: the job's configuration.
        data: columns of its data.
        converted: the converted model, not bound to a cache yet.
        rows: row schema of the store.
        spec: oracle spec of the training data, for the cacher.
        dense: executor of the dense part.
        stages: stages of the dense part; None if it is trained whole.
    """

    config: Config
    data: DataSchema
    converted: Converted
    rows: RowSchema
    spec: OracleSpec
    dense: DenseExecutor
    stages: StagedJob | None = None

    @property
    def eval_spec(self) -> OracleSpec:
        """Oracle spec of the held-out examples: every rank scores an equal share with the whole model."""
        return dataclasses.replace(self.spec, example_shares=(), rows_delay=0)


def build_training_model(config: Config, data: DataSchema, world_size: int = 1) -> BuiltModel:
    """Build the model and its tables. Dense initial values come from torch's global generator, which this seeds.

    Raises:
        InputError: the model cannot be built or does not fit the data.
    """
    torch.manual_seed(config.run.seed)
    model = build_model(data, config.model)
    converted = convert(
        model,
        data,
        device=torch.device(config.run.device),
        dtype=config.run.dtype,
        optimizers=row_optimizers(config.optim),
        row_dtype=None if config.cache.dtype == "run" else config.cache.dtype,
    )
    rows = converted.row_schema(seed=config.run.seed, rounding=config.cache.rounding)
    num_logits = len(data.labels)
    if config.model.factory:
        num_logits = check_model(converted, data, rows, torch.device(config.run.device), config.model.factory)
    check_loss_weights(config.model.loss_weights, num_logits)
    if config.data.expires:
        check_expiring_tables(converted, data)
    stages = stage_model(converted.model, data, config, world_size)
    dense = (
        dense_executor(converted.model, data, config, world_size)
        if stages is None
        else EagerExecutor(converted.model, precision_of(config.run))
    )
    spec = OracleSpec(
        table_rows=tuple(table.rows for table in converted.row_tables),
        features=converted.features,
        num_slots=cache_rows_of(config, converted, data, rows, world_size),
        grows=config.cache.rows == "auto",
        lookahead=config.oracle.lookahead,
        policy=config.oracle.policy,
        horizon=config.oracle.horizon,
        world_size=world_size,
        assign=config.cacher.assign,
        example_shares=stages.mesh.example_shares if stages is not None else (),
        rows_delay=config.pipeline.rows_delay,
    )
    return BuiltModel(config=config, data=data, converted=converted, rows=rows, spec=spec, dense=dense, stages=stages)


def build_cache(built: BuiltModel) -> RowCache:
    """Build an empty cache and bind the model's embedding modules to it."""
    config = built.config
    device = torch.device(config.run.device)
    cache = RowCache(
        built.rows,
        built.spec.slots_per_rank,
        device,
        prefetch_depth=config.cache.prefetch_depth,
        kernels=select_kernels(built.rows, device, config.run.kernels),
        batches_begun=1 + config.pipeline.rows_delay,
        grows=built.spec.grows,
        is_partial=bool(config.pipeline.partial_shares),
    )
    built.converted.bind(cache)
    return cache


def build_dense(
    built: BuiltModel,
    *,
    rank: int = 0,
    links: StageLinks | None = None,
    reduce: Callable[[int, Collection[int] | None], None] | None = None,
    shares: Mapping[int, StageShare] = MappingProxyType({}),
    replicas: GradientSum | None = None,
    shards: ShardedModel | None = None,
    groups: Mapping[tuple[int, ...], RankGroup] = MappingProxyType({}),
    layered: RankGroup | None = None,
    ranks: RankGroup | None = None,
) -> DensePart:
    """Build the dense part, whole or in stages.

    Args:
        built: the model.
        rank: rank in the job.
        links: with stages: links to the other processes of a pipeline replica.
        reduce: with stages: sums a stage's gradients over the ranks that hold it.
        shares: with stages: this rank's shares of those that are divided among the ranks that hold them.
        replicas: without stages: sums the gradients over the ranks.
        shards: without stages: the model as it is divided among the ranks.
        groups: with stages: groups of the ranks that hold a stage, by ascending ranks.
        layered: group of the ranks that hold layers of K-FAC; None: there is one.
        ranks: with stages: group of all ranks; None: there is one, or their steps do not depend on each other.

    Raises:
        InputError: a growing loss scale is configured where batches cannot be skipped, or the model has no linear
            layers that K-FAC can precondition.
    """
    config, model = built.config, built.converted.model
    undecayed = undecayed_parameters(model.named_parameters(), config.optim.weight_decay_exempt)
    # A rank steps its segments in place of what is divided.
    steps = {} if shards is None else {model.get_parameter(name): own for name, own in shards.segments.items()}
    parameters = [steps.get(parameter, parameter) for parameter in model.parameters()]
    optimizer = dense_optimizer(parameters, config.optim, {steps.get(parameter, parameter) for parameter in undecayed})
    if built.stages is None:
        preconditioning = None
        if config.optim.precondition == "kfac":
            kfac = whole_kfac(model, kfac_settings(config.optim), torch.device(config.run.device), layered)
            preconditioning = Preconditioning({"model": kfac}, dict(model.named_parameters()))
        weights: Weights = ResidentWeights(model, optimizer, replicas)
        if shards is not None:
            weights = ShardedWeights(model, optimizer, shards)
        if config.dense.is_chunked:
            module = built.dense.staged.stages[0].module if isinstance(built.dense, SplitExecutor) else None
            streams = open_streams(config.run.device)
            weights = ChunkedWeights(weights, budget=budget_of(config), streams=streams, module=module)
        return WholeDense(
            weights=weights,
            executor=built.dense,
            skips_nonfinite=config.run.nonfinite == "skip",
            clip=clip_of(config.optim),
            preconditioning=preconditioning,
        )
    undecayed_segments = {
        segment
        for share in shares.values()
        for name, segment in share.segments.items()
        if model.get_parameter(name) in undecayed
    }
    pipeline = DensePipeline(
        staged=built.stages.staged,
        mesh=built.stages.mesh,
        rank=rank,
        make_optimizer=lambda parameters: dense_optimizer(parameters, config.optim, undecayed | undecayed_segments),
        dtype=TORCH_DTYPE[config.run.dtype],
        device=torch.device(config.run.device),
        seed=config.run.seed,
        links=links,
        reduce=reduce,
        shares=shares,
        host_activations=open_streams(config.run.device) if config.pipeline.activations == "host" else None,
        backward_shares=built.stages.backward_shares,
        capture=graph_capture(config) if config.run.cuda_graph else None,
    )
    staged_settings: dict[str, Any] = {
        "pipeline": pipeline,
        "optimizer": optimizer,
        "precision": built.dense.precision,
        "skips_nonfinite": config.run.nonfinite == "skip",
        "clip": clip_of(config.optim),
        "ranks": ranks,
        "loss": loss_of(config.model, built.data),
        "orders": built.stages.order_log(rank, records=bool(config.pipeline.record)),
    }
    if config.optim.precondition == "kfac":
        own = stage_kfacs(built.stages.staged, built.stages.mesh, config, rank=rank, groups=groups, layered=layered)
        if own.kfacs:
            named = {str(stage): kfac for stage, kfac in own.kfacs.items()}
            staged_settings["preconditioning"] = Preconditioning(named, dict(model.named_parameters()), own.sizes)
    if config.dense.is_chunked:
        chunk_stages(pipeline, budget_of(config), open_streams(config.run.device))
    return StagedDense(**staged_settings)


def build_parts(built: BuiltModel, dense: DensePart) -> tuple[LoopPart, ...]:
    """The optional parts of the training loop; after the ranks' models have been made equal."""
    optim = built.config.optim
    parts: list[LoopPart] = []
    if dense.preconditioning is not None:
        parts.append(dense.preconditioning)
    rule = plateau_rule(optim, larger_is_better=bool(metric_of(built.config.eval.metric).higher_is_better))
    plateau = None if rule is None else PlateauFactor(rule)
    if plateau is not None:
        parts.append(plateau)
    schedule, rows = rate_schedule(optim, plateau), rows_rate_schedule(optim, plateau)
    if (schedule, rows) != (Schedule(), Schedule()):
        parts.append(LearningRates(dense, schedule=schedule, rows=rows, rows_delay=built.config.pipeline.rows_delay))
    if optim.ema_decay:
        parts.append(WeightAverage(dense, optim.ema_decay, evaluates=optim.ema_evaluate))
    if built.config.run.verify and isinstance(dense, StagedDense):
        parts.append(_verification(built, dense))
    return tuple(parts)


def _verification(built: BuiltModel, dense: StagedDense) -> Verification:
    config = built.config
    undecayed = undecayed_parameters(built.converted.model.named_parameters(), config.optim.weight_decay_exempt)

    def program(num_batches: int) -> Program:
        schedule, _ = check_ranks(config.pipeline, 1)
        step = dense.pipeline.step
        if isinstance(schedule, AsynchronousSchedule):
            return schedule.loop(step.graph).unroll(num_batches)
        return step.program

    rules = ReferenceRules(
        make_program=program,
        make_optimizer=lambda parameters: dense_optimizer(parameters, config.optim, undecayed),
        loss=loss_of(config.model, built.data),
        seed=config.run.seed,
        kfac=kfac_settings(config.optim) if config.optim.precondition == "kfac" else None,
    )
    return Verification(dense, config.run.verify, rules)


def engine_settings(config: Config) -> EngineSettings:
    """Numbers of the engine."""
    return EngineSettings(
        prefetch_depth=config.cache.prefetch_depth,
        read_ahead=config.cache.read_ahead,
        rows_delay=config.pipeline.rows_delay,
        expires=config.data.expires,
    )


def build_engine(
    built: BuiltModel,
    store: Store,
    *,
    cache: RowCache | None = None,
    dense: DensePart | None = None,
    parts: Sequence[LoopPart] | None = None,
    trace: Trace | None = None,
    peers: Peers | None = None,
    claim: Callable[[], bool] | None = None,
    recorder: Recorder | None = None,
    known: IsWritten | None = None,
    wake: Callable[[], object] | None = None,
) -> Engine:
    """Build an engine over an open store whose schema is `built.rows`.

    Args:
        built: the model.
        store: open store.
        cache, dense: from `build_cache` and `build_dense`; default: for a job of one rank.
        parts: from `build_parts`, the default.
        trace, peers, claim, recorder, known, wake: see `Engine`.
    """
    config = built.config
    dense = build_dense(built) if dense is None else dense
    return Engine(
        layout=built.converted.layout,
        cache=build_cache(built) if cache is None else cache,
        store=store,
        dense=dense,
        prepare=InputMaker(built.data),
        settings=engine_settings(config),
        row_steps=row_steps_of(built.converted.layout, built.converted.optimizers),
        trace=trace,
        peers=peers,
        claim=claim,
        recorder=recorder,
        known=known,
        wake=wake,
        parts=build_parts(built, dense) if parts is None else parts,
    )
