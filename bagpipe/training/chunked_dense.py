"""`ChunkedDense`: the whole model, with parameters, gradients and optimizer state in chunks under a byte budget.

    F  forward, units come one after another    B  gradients go to their chunks    OPT  chunk by chunk

Of a model that is divided among ranks (`ShardedModel`) chunks hold what the forward needs and what this rank steps:

    dense.shard            chunks of parameters   of segments, their gradients and state   beside the budget
    optimizer, gradients   all                    this rank's                              what is sent
    parameters             none                   this rank's                              … and gathered units

The same operators in the same order as `WholeDense`, on the same values: the same bits. Only where gradients are
looked at or limited differs: each while it is on the device. A norm is that of the norms of gradients, one by one, in
the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import DenseCopy
from bagpipe.dense.chunks.budget import Budget, Piece
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import Limited, listed
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.errors import InputError
from bagpipe.pipeline.report import LaneReport
from bagpipe.pipeline.stream import Streams
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import WholeDense
from bagpipe.training.part import InFlightBatch, LoopRun

__all__ = ["ChunkedDense"]


class ChunkedDense(WholeDense):
    """The whole model in one lane, under a budget.

    Args:
        budget: of the device.
        streams: of the model's device.
        module: that the executor calls with the parameters; None: the model.
        settings: of `WholeDense`; the executor keeps no address of a parameter.

    Attributes:
        chunked: the model in chunks.

    Raises:
        InputError: several ranks have devices, or see `ChunkedModel.of`.
    """

    def __init__(self, *, budget: Budget, streams: Streams, module: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._has_replicas = settings.get("replicas") is not None
        self._shards: ShardedModel | None = settings.get("shards")
        if (self._has_replicas or self._shards is not None) and streams.is_async:
            raise InputError(
                "chunks of the dense part are not possible on several ranks with CUDA devices: use run.device cpu"
            )
        pieces = _pieces(self.model, self.optimizer, self._shards, self.model if module is None else module)
        self._stepped = len(pieces) - 1
        self._are_divided = self._shards is not None and not self._stepped
        self.chunked = ChunkedModel.of_pieces(pieces, budget, streams, whole=self.model)
        if self._shards is not None:
            self._shards.live_apart()

    def start(self, run: LoopRun) -> None:
        self.rest()  # an earlier run can have been given up
        super().start(run)
        self.chunked.start(run.trace)

    def end(self) -> None:
        self.chunked.end()
        super().end()

    def close(self) -> None:
        self.chunked.close()

    def evaluating(self) -> AbstractContextManager[object]:
        self.rest()  # what ranks share is home
        return super().evaluating()

    def rest(self) -> None:
        self.chunked.rest()

    def keep_averages(self, averages: Mapping[str, Tensor], decay: float) -> bool:
        self.chunked.keep_averages(averages, decay)
        return True

    def lane_reports(self) -> Mapping[str, LaneReport]:
        return self.chunked.arena.lane.reports("compute")

    def capture(
        self, streams: Streams, chunk: str, *, rng: Mapping[str, Tensor] | None, parts: Mapping[str, Tensor]
    ) -> DenseCopy:
        self.chunked.settle()
        return super().capture(streams, chunk, rng=rng, parts=parts)

    def begin(self, b: int) -> None:
        super().begin(b)
        self.chunked.begin()
        if self._are_divided:
            self.chunked.settle()  # nothing moves before the step, while units are gathered from this rank's share

    def forward(self, b: int) -> None:
        with nullcontext() if self._are_divided else self.chunked.computing():
            super().forward(b)

    def step(self, b: int) -> None:
        if not self._has_replicas:
            super().step(b)
        else:
            self.chunked.gradients.show()
            super().step(b)
        self.chunked.finish()

    def update(self, batch: InFlightBatch) -> None:
        if self._has_replicas:
            self.chunked.gradients.take_shown()
        if self._shards is not None:
            self.chunked.take_back(self._stepped)
        found: dict[nn.Parameter, Tensor] = {}
        norms = list[Tensor]()
        limited: Limited | None = None

        def prepare(parameters: Sequence[nn.Parameter]) -> None:
            self.loss_scale.unscale_parameters(parameters)
            if self._shards is None:
                norms.extend(self.clip.measure(parameters))
            else:
                found.update(zip(parameters, self.clip.norms(parameters, squares=True), strict=True))

        def update(parameters: Sequence[nn.Parameter]) -> None:
            if not self.clip.limits_dense:
                prepare(parameters)
            elif limited is not None:
                self.clip.scale(parameters, limited)
            self.optimizer.step()

        if self.clip.limits_dense:  # it needs all gradients before the first step: one more pass through them
            self.chunked.measure(prepare, piece=self._stepped)
            if self._shards is not None:
                norms += self._shards.whole_norms(listed(found, self._shards.segments.values()))
        limited = self.limited(norms, batch)
        self.chunked.step(update, piece=self._stepped)
        if self._shards is not None:
            self.chunked.open()
            self._held.spread()

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        return self.chunked.marks.items() if self._shards is None else super().checked_gradients(point, key)


def _pieces(model: nn.Module, optimizer: Optimizer, shards: ShardedModel | None, module: nn.Module) -> list[Piece]:
    """What is in chunks: the parameters unless they are divided, and at the end what the optimizer steps."""
    parameters = dict(model.named_parameters())
    if shards is None:
        return [Piece(module=module, parameters=parameters, optimizer=optimizer)]
    whole = Piece(module=module, parameters=parameters, optimizer=None, collects=False)
    own = Piece(module=model, parameters=shards.segments, optimizer=optimizer)
    return [own] if shards.level == "parameters" else [whole, own]
