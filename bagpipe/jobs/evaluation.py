"""Evaluation beside a training that rests: a cache, lanes and messages of its own.

training at rest, store current ──evaluation_run──> engine of the evaluation: step, step, …
afterwards: the model's modes, lookups, buffers and random state are those before
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager

import torch
from torch import nn

from bagpipe.cache.row_cache import RowCache
from bagpipe.dense.parallel.broadcast import RankBuffers, share_weights
from bagpipe.distributed.interface import Peers
from bagpipe.jobs.open_job import OpenJob
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.training.current_rows import RowReader
from bagpipe.training.engine import Engine
from bagpipe.training.evaluation import Scoring
from bagpipe.training.reading import PrepareInputs
from bagpipe.training.stepped_evaluation import Outputs
from bagpipe.training.stepped_run import SteppedRun

__all__ = ["buffers_of_rank_0", "evaluation_run"]


@contextmanager
def evaluation_run(
    job: OpenJob,
    batches: Generator[RankBatch, None, None],
    scoring: Scoring | Outputs,
    *,
    peers: Peers | None,
    prepare: PrepareInputs | None = None,
    cache: RowCache | None = None,
    reader: RowReader | None = None,
    wake: Callable[[], object] | None = None,
    stops_on_signals: bool = False,
) -> Iterator[SteppedRun]:
    """A run of evaluation whose batches the caller scores, one at a time.

    All ranks enter it alike, with a store that is current (`JobSession.flush`), or a reader that is.

    Args:
        job: its lanes rest, or no run is under way.
        batches: planned for a cache of the job's size; closed at the end.
        scoring: scores the batches.
        peers: the other ranks, with messages that no lane of the training waits for (`TorchPeers.evaluation`).
        prepare: makes a batch's inputs; None: that of the training.
        cache: an empty one; None: a new one.
        reader: reads the rows; None: the store.
        wake: called when the run has failed, see `Engine`.
        stops_on_signals: SIGINT and SIGTERM end the run after the batches that are read.
    """
    model = job.job.model
    with ExitStack() as stack:
        stack.enter_context(closing(batches))
        stack.enter_context(job.engine.dense.evaluating())  # what is shared is whole
        _share(job)
        stack.enter_context(_unchanged(model))
        stack.enter_context(buffers_of_rank_0(model, job.replicas))
        cache = job.job.new_cache() if cache is None else cache
        cache.history = job.engine.cache.history
        stack.enter_context(_bound(job.job.bind, cache, job.engine.cache))
        training = job.engine
        engine = Engine(
            layout=training.layout,
            cache=cache,
            store=training.store,
            dense=training.dense,
            prepare=training.prepare if prepare is None else prepare,
            settings=training.settings,
            row_steps=training.row_steps,
            trace=training.trace,
            peers=peers,
            wake=wake,
            parts=training.parts,
            reader=reader,
        )
        yield stack.enter_context(engine.evaluate_in_steps(batches, scoring, stops_on_signals=stops_on_signals))


def _share(job: OpenJob) -> None:
    """Give all ranks the stages' weights, as their first holders have them."""
    peers = job.ranks.peers
    if job.held and peers is not None:
        share_weights(job.held, peers.dense)
        for part in job.parts:
            part.share(job.held, peers.dense)


@contextmanager
def buffers_of_rank_0(model: nn.Module, replicas: RankBuffers | None) -> Iterator[None]:
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
def _bound(bind: Callable[[RowCache], object], cache: RowCache, before: RowCache) -> Iterator[None]:
    """Inside, the model's collections read from another cache."""
    bind(cache)
    try:
        yield
    finally:
        bind(before)


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
