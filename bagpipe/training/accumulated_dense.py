"""`AccumulatedDense`: one optimizer step for several micro-batches, each with a forward and a backward of its own.

    X_EMBED   F0 B0   F1 B1   …   X_EMBED_GRAD          X_UPDATE   OPT
    begin     gradients of parameters add up in `grad`;  rows: once   parameters: once
              those of rows are joined (`MicroLookups`)

The executor weighs each micro-batch by its share of the examples of the whole batch, on all ranks. A batch may have
fewer micro-batches than the loop has actions for; the actions that are left do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bagpipe.cache.lookup import ActiveBatch
from bagpipe.cache.micro_batches import active_parts, join_gradients
from bagpipe.cache.row_cache import RowCache
from bagpipe.checkpoint.dense_state import random_state, restore_random_state
from bagpipe.errors import JobError
from bagpipe.pipeline.interpret import Handler
from bagpipe.schedule.builders.whole_model import declare_accumulation
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import WholeDense
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["AccumulatedDense", "MicroLookups"]


class AccumulatedDense(WholeDense):
    """The whole model in one lane, micro-batch by micro-batch. `InFlightBatch.inputs` is a tuple, one per micro-batch.

    Needs `MicroLookups` in the same loop.

    Args:
        microbatches: micro-batches of a batch, at most.
        settings: of `WholeDense`.
    """

    def __init__(self, *, microbatches: int, **settings: Any) -> None:
        super().__init__(**settings)
        self._microbatches = microbatches
        self._random: Mapping[str, Tensor] | None = None

    def declare(self, loop: LoopBuilder) -> None:
        declare_accumulation(loop, microbatches=self._microbatches)

    def handlers(self) -> Mapping[str, Handler]:
        return {
            "X_EMBED": self.begin,
            "F": self.forward,
            "B": self.backward,
            "X_EMBED_GRAD": self.complete,
            "OPT": self.step,
        }

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self._random = None
        self.optimizer.zero_grad(set_to_none=True)  # of micro-batches of a run that was given up

    def begin(self, b: int) -> None:
        super().begin(b)
        self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self._random = random_state(self._device)

    def forward(self, index: int) -> None:
        b, part = divmod(index, self._microbatches)
        batch = self._run.in_flight[b]
        inputs: Sequence[Any] = batch.inputs or ()
        if part < len(inputs) and inputs[part] is not None:
            num_examples = batch.rank_batch.num_global_examples
            batch.dense_pass = made = self._executor.forward(inputs[part], num_examples, self.loss_scale)
            if made is not None:
                batch.loss_sum = made.loss_sum if batch.loss_sum is None else batch.loss_sum + made.loss_sum

    def backward(self, index: int) -> None:
        batch = self._run.in_flight[index // self._microbatches]
        if batch.dense_pass is not None:
            batch.dense_pass.backward()
            loss = batch.dense_pass.loss.detach()
            batch.loss = loss if batch.loss is None else batch.loss + loss
            batch.dense_pass = None

    def step(self, b: int) -> None:
        super().step(b)
        self._random = None

    def starts(self, key: OpKey, index: int) -> tuple[str, str, int] | None:
        b, part = divmod(index, self._microbatches)
        return None if part else ("model", "model", b)

    def roll_back(self) -> None:
        if self._random is None:
            return
        restore_random_state(self._random, self._device)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
        self.optimizer.zero_grad(set_to_none=True)
        self._random, self._buffers = None, {}


class MicroLookups(LoopPart):
    """Has each forward look up the rows of its micro-batch, and joins their gradients.

    Args:
        cache: the rows.
        microbatches: micro-batches of a batch, at most.
    """

    def __init__(self, cache: RowCache, microbatches: int) -> None:
        self._cache = cache
        self._microbatches = microbatches
        self._whole: ActiveBatch | None = None
        self._parts: tuple[ActiveBatch, ...] = ()

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.FORWARD, when="before", call=self._select)
        yield Hook(at=Point.GRADIENTS, when="before", call=self._join)

    def start(self, run: LoopRun) -> None:
        self._whole, self._parts = None, ()

    def roll_back(self) -> None:
        self._whole, self._parts, self._cache.current = None, (), None

    def _select(self, key: OpKey, index: int) -> None:
        part = index % self._microbatches
        if part == 0:
            self._whole = self._cache.current
            if self._whole is None:
                raise JobError(f"micro-batch {index}: the cache has begun no batch")
            self._parts = active_parts(self._whole)
        if part < len(self._parts):
            self._cache.current = self._parts[part]

    def _join(self, key: OpKey, b: int) -> None:
        assert self._whole is not None, "selected before"
        join_gradients(self._whole, self._parts)
        self._cache.current = self._whole
        self._whole, self._parts = None, ()
