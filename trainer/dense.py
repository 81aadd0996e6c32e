"""Dense executor and precision of a job, from its configuration.

run.{autocast,loss_scale…} ─> Precision        run.compile, run.cuda_graph ─> DenseExecutor        model.loss ─> Loss
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from bagpipe.config.sections import Config, ModelConfig, RunConfig
from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.compiler import check_compiler
from bagpipe.dense.executor import DenseExecutor, EagerExecutor, SplitExecutor
from bagpipe.dense.loss import Loss
from bagpipe.dense.loss_scale import LossScale
from bagpipe.dense.precision import AUTOCAST_DTYPES, DEFAULT_LOSS_SCALE, Precision
from bagpipe.dense.stage_module import prepared
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.models.torchrec_models import num_dense_inputs
from bagpipe.pipeline.stage.cuda_graph import CudaGraphExecutor
from bagpipe.pipeline.stage.graphs import open_graphs
from bagpipe.pipeline.stage.recorded_stage import GraphCapture
from bagpipe.split.split import split_parts, trace_parts
from bagpipe.split.staged_model import StagedModel
from bagpipe.types.schema import DataSchema
from trainer.tasks import Tasks

__all__ = ["budget_of", "dense_executor", "graph_capture", "loss_of", "precision_of"]


def precision_of(run: RunConfig) -> Precision:
    """Precision of the dense part of a run."""
    return Precision(
        device_type=torch.device(run.device).type,
        autocast_dtype=AUTOCAST_DTYPES[run.autocast],
        loss_scale=LossScale(
            value=run.loss_scale or DEFAULT_LOSS_SCALE[run.autocast], growth_interval=run.loss_scale_growth_interval
        ),
    )


def budget_of(config: Config) -> Budget:
    """What the device holds of the dense part."""
    return Budget(
        num_bytes=config.dense.budget_bytes,
        chunk_bytes=config.dense.chunk_bytes,
        state_on_host=config.dense.state == "host",
        averages=config.optim.ema_decay > 0,
    )


def loss_of(config: ModelConfig, data: DataSchema) -> Loss:
    """Loss that a model is trained on, by the columns of the data."""
    return dataclasses.replace(
        Tasks.of(data).loss,
        name=config.loss,
        label_smoothing=config.label_smoothing,
        pos_weight=config.pos_weight,
        gamma=config.focal_gamma,
        alpha=config.focal_alpha,
        head_weights=config.loss_weights,
    )


def dense_executor(model: nn.Module, data: DataSchema, config: Config, world_size: int) -> DenseExecutor:
    """Executor of a model without stages.

    Args:
        model: with converted embedding collections.
        data: columns of the data.
        config: the job.
        world_size: number of ranks.

    Raises:
        InputError: compilation or CUDA graph capture is requested, and the embedding lookups cannot be separated from
            the dense part, no compiler is available, or the forward draws random numbers.
    """
    run = config.run
    precision, loss = precision_of(run), loss_of(config.model, data)
    if not (run.compile or run.cuda_graph):
        return EagerExecutor(model, precision, loss)
    if run.compile:
        check_compiler(torch.device(run.device))
    staged = prepared(_in_one_stage(model, data, run, precision), precision, compiles=run.compile)
    if not run.cuda_graph:
        return SplitExecutor(staged, precision, loss)
    return CudaGraphExecutor(staged, precision, graph_capture(config), copies=world_size > 1, loss=loss)


def graph_capture(config: Config) -> GraphCapture:
    """Graphs and batch size with which a job records its dense part."""
    return GraphCapture(graphs=open_graphs(torch.device(config.run.device)), full_batch=config.data.batch_size)


def _in_one_stage(model: nn.Module, data: DataSchema, run: RunConfig, precision: Precision) -> StagedModel:
    key = "run.compile" if run.compile else "run.cuda_graph"
    try:
        with precision.autocast():
            parts = trace_parts(model, num_dense=num_dense_inputs(data), dtype=TORCH_DTYPE[run.dtype])
        return split_parts(parts, stages=1)
    except InputError as error:
        raise InputError(f"{key} needs embedding lookups that are separate from the dense part: {error}") from None
