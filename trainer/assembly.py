"""A job's parts, from its configuration: what is trained (`Trainee`) and what trains it (`Engine`). Opens nothing.

config, data schema ──build_trainee──> model, row schema, what to plan for
                          └── store opened for the row schema ──build_engine──> Engine
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagpipe.cache.row_cache import RowCache
from bagpipe.config.sections import Config
from bagpipe.dense.executor import DenseExecutor, EagerExecutor
from bagpipe.distributed.interface import StageLinks
from bagpipe.embedding.torchrec_collections import Converted, convert
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.kernels.select import select_kernels
from bagpipe.models.torchrec_models import build_model
from bagpipe.oracle.plan import OracleSpec
from bagpipe.pipeline.stage.dense_pipeline import DensePipeline
from bagpipe.pipeline.trace import Trace
from bagpipe.store.interface import Store
from bagpipe.training.engine import Engine, EngineSettings
from bagpipe.types.schema import DataSchema, RowSchema
from trainer.dense import dense_executor, precision_of
from trainer.inputs import InputMaker
from trainer.optimizers import dense_optimizer
from trainer.stages import StagedJob, stage_model

__all__ = ["Trainee", "build_engine", "build_trainee"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainee:
    """What a job trains.

    Attributes:
        config: the job's configuration.
        data: columns of its data.
        converted: the model, not bound to a cache yet.
        rows: the bytes of its rows, for the store.
        spec: what the cacher is asked to plan for.
        dense: how its dense part is computed.
        stages: the dense part in stages; None: it is trained whole.
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
        """For the held-out examples: every rank scores an equal part with the whole model."""
        return dataclasses.replace(self.spec, example_shares=())


def build_trainee(config: Config, data: DataSchema, world_size: int = 1) -> Trainee:
    """The model and its tables. Dense initial values come from torch's global generator, seeded here.

    Raises:
        InputError: the model cannot be built, or does not fit the data.
    """
    torch.manual_seed(config.run.seed)
    model = build_model(data, config.model)
    converted = convert(model, data, device=torch.device(config.run.device), dtype=config.run.dtype)
    rows = RowSchema(
        tables=converted.row_tables,
        optimizer=config.optim.rows,
        dtype=config.row_dtype,
        seed=config.run.seed,
        rounding=config.row_rounding,
    )
    stages = stage_model(converted.model, data, config, world_size)
    dense = (
        dense_executor(converted.model, data, config, world_size)
        if stages is None
        else EagerExecutor(converted.model, precision_of(config.run))
    )
    spec = OracleSpec(
        table_rows=tuple(table.rows for table in converted.row_tables),
        features=converted.features,
        num_slots=config.cache.rows,
        lookahead=config.oracle.lookahead,
        policy=config.oracle.policy,
        world_size=world_size,
        assign=config.cacher.assign,
        example_shares=stages.mesh.example_shares if stages is not None else (),
    )
    return Trainee(config=config, data=data, converted=converted, rows=rows, spec=spec, dense=dense, stages=stages)


def build_engine(
    trainee: Trainee,
    store: Store,
    trace: Trace | None = None,
    *,
    rank: int = 0,
    links: StageLinks | None = None,
    reduce: Callable[[int], None] | None = None,
) -> Engine:
    """An engine with an empty cache over an open store whose schema is `trainee.rows`.

    Args:
        trainee: what is trained.
        store: open.
        trace: records every action.
        rank: of the job.
        links: to the other processes of a pipeline's replica.
        reduce: sums a stage's gradients over the ranks that hold it.
    """
    config = trainee.config
    device = torch.device(config.run.device)
    pipeline: DensePipeline | None = None
    if trainee.stages is not None:
        pipeline = DensePipeline(
            staged=trainee.stages.staged,
            mesh=trainee.stages.mesh,
            rank=rank,
            make_optimizer=lambda parameters: dense_optimizer(parameters, config.optim),
            dtype=TORCH_DTYPE[config.run.dtype],
            device=device,
            seed=config.run.seed,
            links=links,
            reduce=reduce,
        )
    kernels = select_kernels(trainee.rows, device, config.run.kernels)
    cache = RowCache(
        trainee.rows, config.cache.rows, device, prefetch_depth=config.cache.prefetch_depth, kernels=kernels
    )
    trainee.converted.bind(cache)
    return Engine(
        model=trainee.converted.model,
        layout=trainee.converted.layout,
        cache=cache,
        store=store,
        optimizer=dense_optimizer(trainee.converted.model.parameters(), config.optim),
        prepare=InputMaker(trainee.data),
        settings=EngineSettings(
            prefetch_depth=config.cache.prefetch_depth,
            read_ahead=config.cache.read_ahead,
            rows_lr=config.optim.rows_lr,
            eps=config.optim.eps,
            nonfinite="skip" if config.run.nonfinite == "skip" else "stop",
        ),
        trace=trace,
        pipeline=pipeline,
        dense=trainee.dense,
    )
