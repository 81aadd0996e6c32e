"""Evaluation in the middle of training: a cache, lanes and messages of its own, while those of training rest.

training at rest, store current ──> planner, cache, engine of the evaluation ──step──> outputs
afterwards: the model's modes, lookups, buffers and random state are those before
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import torch
from torch import nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.distributed.interface import Peers
from bagpipe.embedding.torchrec_collections import Converted
from bagpipe.errors import InputError
from bagpipe.jobs.ranks import Ranks
from bagpipe.lookahead.select import select_planner
from bagpipe.train_pipeline.model_parts import ModelParts
from bagpipe.train_pipeline.open_pipeline import OpenPipeline
from bagpipe.train_pipeline.options import Options
from bagpipe.train_pipeline.user_batches import Position, UserBatches
from bagpipe.training.engine import Engine
from bagpipe.training.stepped_evaluation import Outputs
from bagpipe.training.stepped_run import SteppedRun

__all__ = ["buffers_of_rank_0", "evaluate"]


def evaluate(
    opened: OpenPipeline, model: ModelParts, options: Options, batches: UserBatches, loader: Iterable[Any]
) -> Generator[Any, None, Exception | None]:
    """Outputs of the model for the batches of a loader.

    Every rank scores its own batches. One whose batches have ended waits for the others. A rank that closes the
    generator ends the evaluation of all.

    Args:
        opened: its lanes rest, and its store is current; on all ranks.
        model, options: of the pipeline.
        batches: holds the batches of this evaluation.
        loader: the batches.

    Returns:
        The error of the loader, or of that of another rank, after the outputs of the batches before. InputError:
        another rank has closed its generator, and this one has not. None: all batches are scored.

    Raises:
        Exception: of the model.
        StoreError, PeerError: the evaluation cannot go on.
    """
    job, outputs = opened.job, Outputs(model.converted.model)
    with ExitStack() as stack:
        stack.enter_context(_unchanged(model.converted.model))
        stack.enter_context(buffers_of_rank_0(model.converted.model, job.replicas))
        cache = job.job.new_cache()
        stack.enter_context(_bound(model.converted, cache, job.engine.cache))
        peers = None if job.ranks.peers is None else job.ranks.peers.evaluation()
        planner = stack.enter_context(
            select_planner(
                opened.spec,
                planner=options.planner,
                group=None if peers is None else peers.plans,
                uneven="join",
            )
        )
        planned = stack.enter_context(closing(planner.run(batches.read(iter(loader), Position()))))
        run = stack.enter_context(_engine(job.engine, cache, batches, peers).evaluate_in_steps(planned, outputs))
        try:
            while (batch := run.step()) is not None:
                batches.forget(run.next_batch)
                if batch.inputs is not None:
                    yield outputs.outputs
        except GeneratorExit:
            if peers is not None:
                _leave(run, outputs, job.ranks)
            raise
        result = run.end()
        left = job.ranks.gather(False) if result.report.stopped else []
    if batches.error is not None or result.input_error is not None:
        return batches.error or result.input_error
    if any(left):
        return InputError(
            f"rank {left.index(True)} has left the evaluation: it ends at batch {run.next_batch} on all ranks"
        )
    return None


def _leave(run: SteppedRun, outputs: Outputs, ranks: Ranks) -> None:
    """End an evaluation early, with all ranks: none waits for a message that does not come."""
    outputs.is_dropping = True
    run.stop()
    while run.step() is not None:
        pass
    run.end()
    ranks.gather(True)


def _engine(training: Engine, cache: RowCache, batches: UserBatches, peers: Peers | None) -> Engine:
    """An engine like that of the training, with another cache and messages of its own."""
    return Engine(
        layout=training.layout,
        cache=cache,
        store=training.store,
        dense=training.dense,
        prepare=batches.prepare,
        settings=training.settings,
        row_steps=training.row_steps,
        peers=peers,
        parts=training.parts,
    )


@contextmanager
def buffers_of_rank_0(model: nn.Module, replicas: DenseParallel | None) -> Iterator[None]:
    """Inside, the model has rank 0's buffers. All ranks enter it."""
    if replicas is None:
        yield
        return
    own = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    replicas.share_buffers()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in own:
                buffer.copy_(value)


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
