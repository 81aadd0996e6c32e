"""Evaluation in the middle of training: a cache and lanes of its own, while those of training rest.

training at rest, store current ──> planner, cache, engine of the evaluation ──step──> outputs
afterwards: the model's modes, lookups and random state are those before
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch import nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.torchrec_collections import Converted
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.open_pipeline import OpenPipeline, new_cache, open_planner
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.engine import Engine
from bagpipe.training.stepped_evaluation import Outputs

__all__ = ["evaluate"]


def evaluate(
    opened: OpenPipeline, model: ModelParts, options: Options, batches: UserBatches, loader: Iterable[Any]
) -> Iterator[Any]:
    """Outputs of the model for the batches of a loader.

    Args:
        opened: its lanes rest, and its store is current.
        model, options: of the pipeline.
        batches: holds the batches of this evaluation.
        loader: the batches.

    Raises:
        Exception: of the loader, after the outputs of the batches before; of the model.
    """
    outputs = Outputs(model.converted.model)
    with ExitStack() as stack:
        stack.enter_context(_unchanged(model.converted.model))
        cache = new_cache(model, options)
        stack.enter_context(_bound(model.converted, cache, opened.engine.cache))
        engine = _engine(opened.engine, cache, batches)
        planner = stack.enter_context(open_planner(opened.spec, options, opened.ranks))
        planned = stack.enter_context(closing(planner.run(batches.read(iter(loader), Position()))))
        run = stack.enter_context(engine.evaluate_in_steps(planned, outputs))
        while (batch := run.step()) is not None:
            batches.forget(run.next_batch)
            if batch.inputs is not None:
                yield outputs.outputs
        result = run.end()
    error = batches.error or result.input_error
    if error is not None:
        raise error


def _engine(training: Engine, cache: RowCache, batches: UserBatches) -> Engine:
    """An engine like that of the training, with another cache."""
    return Engine(
        layout=training.layout,
        cache=cache,
        store=training.store,
        dense=training.dense,
        prepare=batches.prepare,
        settings=training.settings,
        row_steps=training.row_steps,
        peers=training.peers,
        parts=training.parts,
    )


@contextmanager
def _bound(converted: Converted, cache: RowCache, before: RowCache) -> Iterator[None]:
    """Inside, the model's collections read from another cache."""
    converted.bind(cache)
    try:
        yield
    finally:
        converted.bind(before)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode. Afterwards modes and torch's random state are those before."""
    modes = {module: module.training for module in model.modules()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
