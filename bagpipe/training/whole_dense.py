"""`WholeDense`: the whole model in one lane.

    F   B   OPT                                         a `DenseExecutor` computes; `Weights` lie somewhere
    X_EMBED   F0 B0   F1 B1   …   X_EMBED_GRAD   OPT    several micro-batches, each with lookups of its own
    begin     gradients of parameters add up in `grad`; those of rows are joined (`MicroLookups`)

With K-FAC further operations are those of `Preconditioning`, in the same lane.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.checkpoint.dense_state import DenseCopy, DenseState, random_state, restore_random_state
from bagpipe.dense.clip import NO_CLIP, Clip, Prepare
from bagpipe.dense.executor import DenseExecutor
from bagpipe.dense.loss_scale import ScaleHolder
from bagpipe.errors import InputError
from bagpipe.pipeline.interpret import Handler
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.builders.whole_model import declare_accumulation, declare_dense
from bagpipe.schedule.ir.loop_builder import LoopBuilder, Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import DensePart, ModelChunk
from bagpipe.training.part import LoopRun
from bagpipe.training.preconditioning import LayersAt, Preconditioning
from bagpipe.training.weights import Weights

__all__ = ["WholeDense"]


class WholeDense(DensePart):
    """The whole model in one lane. With several micro-batches, `InFlightBatch.inputs` is a tuple, one for each.

    The executor weighs each micro-batch by its share of the examples of the whole batch, on all ranks. A batch may have
    fewer micro-batches than the loop has actions for; the actions that are left do nothing.

    Args:
        weights: of a model that is called as ``model(dense, sparse)``.
        executor: computes forward and backward.
        skips_nonfinite, clip: see `DensePart`.
        scale_holder: has the loss scale of each batch; None: it is kept here.
        microbatches: of a batch, at most; more than one need `MicroLookups` in the same loop.
        preconditioning: K-FAC of chunk ``model``, in the same loop and before this; None: plain gradients are stepped.

    Raises:
        InputError: the loss scale grows where batches are not left out; or K-FAC of several micro-batches.
    """

    gradient_points = (Point.GRADIENTS,)

    def __init__(
        self,
        *,
        weights: Weights,
        executor: DenseExecutor,
        skips_nonfinite: bool = False,
        clip: Clip = NO_CLIP,
        scale_holder: ScaleHolder | None = None,
        microbatches: int = 1,
        preconditioning: Preconditioning | None = None,
    ) -> None:
        super().__init__(
            model=weights.model,
            optimizer=weights.optimizer,
            precision=executor.precision,
            skips_nonfinite=skips_nonfinite,
            clip=clip,
            preconditioning=preconditioning,
        )
        parameters = tuple((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        self.parameters = dict(parameters)
        self.chunks = {
            "model": ModelChunk(
                name="model",
                parameters=parameters,
                tensors=None,
                optimizer=weights.optimizer,
                counters=self.loss_counters,
            )
        }
        if weights.shares is not None:
            self.divided = {"model": weights.shares}
        self.weights = weights
        if microbatches > 1 and preconditioning is not None:
            raise InputError(f"K-FAC of a whole model needs one micro-batch, got {microbatches}")
        self._executor = executor
        self._scale_holder = scale_holder
        self._microbatches = microbatches
        self._buffers: dict[str, Tensor] = {}
        self._random: Mapping[str, Tensor] | None = None  # before the first micro-batch of several
        self._loss_sum: Tensor

    @property
    def loss_counters(self) -> tuple[str, ...]:
        return ("model",)

    def declare(self, loop: LoopBuilder) -> None:
        kfac = None if self.preconditioning is None else self.preconditioning.kfacs["model"]
        if self._microbatches == 1:
            declare_dense(loop, preconditions=kfac is not None, broadcasts=kfac is not None and kfac.is_shared)
        else:
            declare_accumulation(loop, microbatches=self._microbatches)

    def handlers(self) -> Mapping[str, Handler]:
        if self.preconditioning is not None:
            forward = self.preconditioning.capturing("", self.forward)
            return {"F": forward, "B": self.backward, "REDUCE_GRAD": self.reduce, "OPT": self.step}
        if self._microbatches == 1:
            return {"F": self.forward, "B": self.backward, "OPT": self.step}
        return {
            "X_EMBED": self.begin,
            "F": self.compute,
            "B": self.differentiate,
            "X_EMBED_GRAD": self.complete,
            "OPT": self.step,
        }

    def start(self, run: LoopRun) -> None:
        before = self.loss_scale.carried()
        super().start(run)
        # A run that goes on after another one carries what the holder had then; it may have been set since.
        if self._scale_holder is not None and run.carried and self.loss_scale.carried() != before:
            self._scale_holder.write(self.loss_scale)
        self.weights.begin(run.trace)
        if self._microbatches > 1:
            self.weights.clear()  # of micro-batches of a run that was given up
        carried = run.carried.get("loss_sum", 0.0)
        self._loss_sum = torch.full((), carried, dtype=torch.float64, device=self.weights.device)
        self._buffers, self._random = {}, None
        if self.preconditioning is not None:
            kfac = self.preconditioning.kfacs["model"]
            place = LayersAt(
                prefix="",
                chunk="model",
                layers=kfac.layers,
                micro_per_batch=1,
                ops=frozenset(("COV_A", "COV_G", "X_INV", "PRECOND", *(("X_BCAST",) if kfac.is_shared else ()))),
                inversions_per_batch=1,
            )
            self.preconditioning.attach(self, [place])

    def forward(self, b: int) -> None:
        self.begin(b)
        self.compute(b)

    def backward(self, b: int) -> None:
        self.differentiate(b)
        self.complete(b)

    def begin(self, b: int) -> None:
        """Before the first forward of a batch."""
        if self._scale_holder is not None:
            self.loss_scale = self._scale_holder.read()
        if self.skips_nonfinite or self._microbatches > 1:
            self._buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        if self._microbatches > 1:
            self._random = random_state(self.weights.device)
        self.weights.begin_batch()

    def compute(self, index: int) -> None:
        """The forward of a micro-batch."""
        b, part = divmod(index, self._microbatches)
        batch = self._run.in_flight[b]
        inputs = batch.inputs if self._microbatches == 1 else _part_of(batch.inputs, part)
        with self.weights.forward():
            if inputs is not None:
                num_examples = batch.rank_batch.num_global_examples
                batch.dense_pass = made = self._executor.forward(inputs, num_examples, self.loss_scale)
                if made is not None:
                    batch.loss_sum = made.loss_sum if batch.loss_sum is None else batch.loss_sum + made.loss_sum

    def differentiate(self, index: int) -> None:
        """The backward of a micro-batch. Gradients of parameters add up."""
        batch = self._run.in_flight[index // self._microbatches]
        with self.weights.backward():
            if batch.dense_pass is not None:
                batch.dense_pass.backward()
                loss = batch.dense_pass.loss.detach()
                batch.loss = loss if batch.loss is None else batch.loss + loss
                batch.dense_pass = None

    def complete(self, b: int) -> None:
        """The gradients of the batch's rows are complete."""
        batch = self._run.in_flight[b]
        self.loss_scale.unscale_rows(batch.groups)
        if not self.skips_nonfinite:
            self._count(b)

    def reduce(self, b: int) -> None:
        """Sum the gradients over the ranks, which agree on whether the batch is left out."""
        batch = self._run.in_flight[b]
        is_bad = self.weights.reduce(is_bad=batch.is_skipped if self.skips_nonfinite else None)
        batch.is_skipped = batch.is_skipped or is_bad
        if self.preconditioning is not None:
            self.preconditioning.collect("model", b)

    def step(self, b: int) -> None:
        """Step the parameters with the summed gradients of a batch, or leave the batch out."""
        if self.preconditioning is None:
            self.reduce(b)  # with K-FAC an action of its own
        batch = self._run.in_flight[b]
        if batch.is_skipped:
            self._put_back_buffers()
        else:
            norms = self.weights.measure(self._prepare(), self.clip)
            self.weights.step(self.clip, self.limited(norms, batch))
            if self.skips_nonfinite:
                self._count(b)
        self._buffers, self._random = {}, None
        self.weights.clear()

    def _prepare(self) -> Prepare:
        """The function that unscales summed gradients; with K-FAC one that changes none."""
        if self.preconditioning is None:
            return self.loss_scale.unscale_parameters
        lr = float(next(group["lr"] for group in self.optimizer.param_groups if group["params"]))
        self.preconditioning.limit("model", lr)
        self.weights.take_shown(self.preconditioning.layers)
        return _leave  # PRECOND has done it

    def num_examples(self, at: LayersAt, index: int) -> int:
        """See `Preconditioned`."""
        return self._run.in_flight[index].rank_batch.batch.num_examples

    def is_left_out(self, b: int) -> bool:
        """See `Preconditioned`. The ranks agree when gradients are summed, before the work of K-FAC."""
        return self._run.in_flight[b].is_skipped

    def show_gradients(self, chunk: str, b: int, names: frozenset[str]) -> None:
        """See `Preconditioned`."""
        self.weights.show(names, self.loss_scale.unscale_parameters)

    def roll_back(self) -> None:
        if self._random is None:
            return
        restore_random_state(self._random, self.weights.device)
        self._put_back_buffers()
        self.weights.clear()
        self._random, self._buffers = None, {}

    def finish_batch(self, b: int) -> None:
        super().finish_batch(b)
        if self._scale_holder is not None:
            self._scale_holder.write(self.loss_scale)

    def loss_sums(self, before: int | None = None) -> Mapping[str, Tensor]:
        return {"model": self._loss_sum}

    def starts(self, key: OpKey, index: int) -> tuple[str, str, int] | None:
        b, part = divmod(index, self._microbatches)
        return None if part else ("model", "model", b)

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        return self.weights.gradients()

    def stepped(self) -> Iterable[tuple[str, Tensor]]:
        return self.weights.named()

    def chunk_of(self, key: OpKey) -> ModelChunk | None:
        return self.chunks["model"]

    def evaluating(self) -> AbstractContextManager[object]:
        return self.weights.whole()

    def rest(self) -> None:
        self.weights.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        return self.weights.keep_averages(averages, decay)

    def end(self) -> None:
        self.weights.end()

    def close(self) -> None:
        self.weights.close()

    def lane_reports(self) -> Mapping[str, LaneReport]:
        return self.weights.lane_reports()

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        return self.weights.capture(streams, rng=rng, parts=parts)

    def restore(self, state: DenseState) -> None:
        self.weights.restore(state)

    def digest(self) -> str:
        return self.weights.digest()

    def _count(self, b: int) -> None:
        batch = self._run.in_flight[b]
        if batch.loss_sum is not None:
            self._loss_sum += batch.loss_sum
            batch.loss_sum = None

    def _put_back_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])


def _leave(parameters: Sequence[nn.Parameter]) -> None:
    """Change no gradient."""


def _part_of(inputs: Any, part: int) -> Any:
    """The inputs of a micro-batch; None: there is none."""
    return inputs[part] if inputs is not None and part < len(inputs) else None
