"""Compute only: the same model and batches, every row in device memory, nothing else running. A step's lower bound.

cacher ──steps (planned for a cache of all rows)──> index tensors, inputs, initial rows in their slots
run():   begin, forward, loss, backward, row update, dense step      per batch, in one thread, no store, no lanes
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from bagpipe.cache.batch_context import BatchContext, prepare_batch
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.client.remote import RemoteBatches
from bagpipe.config.sections import Config
from bagpipe.kernels.interface import RowStep
from bagpipe.types.model_inputs import ModelInputs
from cacher.embedded import EmbeddedCacher
from trainer.assembly import build_training_model
from trainer.inputs import InputMaker
from trainer.optimizers import dense_optimizer

__all__ = ["ResidentModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    context: BatchContext
    inputs: ModelInputs
    num_examples: int


class ResidentModel:
    """A model with all rows of all tables in its cache, and prepared batches.

    Args:
        config: of the job; its cache and store are not used.
        num_slots: rows of all tables.
        batches: numbers of the batches to compute.
    """

    def __init__(self, config: Config, *, num_slots: int, batches: range) -> None:
        config = replace(
            config, cache=replace(config.cache, rows=num_slots), oracle=replace(config.oracle, lookahead=1)
        )
        torch.set_num_threads(config.run.threads)
        device = torch.device(config.run.device)
        with ExitStack() as stack:
            cacher = stack.enter_context(EmbeddedCacher(config))
            source = stack.enter_context(RemoteBatches(cacher.url, config, credits=4))
            built = build_training_model(config, source.schema)
            self._cache = RowCache(built.rows, num_slots, device)
            built.converted.bind(self._cache)
            self._model = built.converted.model.train()
            self._optimizer = dense_optimizer(self._model.parameters(), config.optim)
            self._optim = config.optim
            prepare, uploads = InputMaker(source.schema), self._cache.uploads(1)
            self._batches: list[_Batch] = []
            for step in source.batches("train", built.spec, max_steps=batches.stop):
                # Every fetched row is new in a cache that never evicts: it gets its initial value, no store is read.
                owner = replace(step.owner, fetch_new=step.owner.fetch_new | True)
                self._cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
                if step.batch.index in batches:
                    with uploads.batch() as upload:
                        context = prepare_batch(built.converted.layout, step.batch, step.consumer, upload=upload)
                        inputs = prepare(step.batch, upload)
                    assert inputs is not None, "its batches have examples"
                    self._batches.append(_Batch(context=context, inputs=inputs, num_examples=step.num_global_examples))

    def run(self) -> Sequence[float]:
        """Seconds of each batch, computed in order."""
        times_s = []
        start_s = time.perf_counter()
        for number, batch in enumerate(self._batches, start=1):
            self._compute(batch, number)
            end_s = time.perf_counter()
            times_s.append(end_s - start_s)
            start_s = end_s
        return times_s

    def _compute(self, batch: _Batch, number: int) -> None:
        """One step as the engine's compute lane does it."""
        optim, cache = self._optim, self._cache
        cache.begin(batch.context)
        logits = self._model(batch.inputs.dense, batch.inputs.sparse).reshape(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.inputs.labels, reduction="sum")
        (loss / batch.num_examples).backward()  # type: ignore[no-untyped-call]
        cache.update(batch.context, RowStep(lr=optim.rows_lr, eps=optim.eps, step=number))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
