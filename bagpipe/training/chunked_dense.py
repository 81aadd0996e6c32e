"""`ChunkedDense`: the whole model, with parameters, gradients and optimizer state in chunks under a byte budget.

    F  forward, units come one after another    B  gradients go to their chunks    OPT  chunk by chunk

The same operators in the same order as `WholeDense`, on the same values: the same bits. Only where gradients are
looked at or limited differs: each while it is on the device. A norm is that of the norms of gradients, one by one, in
the order of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from bagpipe.checkpoint.dense_state import DenseCopy
from bagpipe.dense.chunks.budget import Budget
from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.dense.clip import Limited
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
        settings: of `WholeDense`; the executor runs operator by operator.

    Attributes:
        chunked: the model in chunks.

    Raises:
        InputError: several ranks have devices, or see `ChunkedModel.of`.
    """

    def __init__(self, *, budget: Budget, streams: Streams, **settings: Any) -> None:
        super().__init__(**settings)
        self._has_replicas = settings.get("replicas") is not None
        if self._has_replicas and streams.is_async:
            raise InputError(
                "chunks of the dense part are not possible on several ranks with CUDA devices: use run.device cpu"
            )
        self.chunked = ChunkedModel.of(self.model, self.optimizer, budget, streams)

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self.chunked.start(run.trace)

    def end(self) -> None:
        super().end()
        self.chunked.end()

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

    def forward(self, b: int) -> None:
        with self.chunked.computing():
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
        norms = list[Tensor]()
        limited: Limited | None = None

        def prepare(parameters: Sequence[nn.Parameter]) -> None:
            self.loss_scale.unscale_parameters(parameters)
            norms.extend(self.clip.measure(parameters))

        def update(parameters: Sequence[nn.Parameter]) -> None:
            if not self.clip.norm:
                prepare(parameters)
            elif limited is not None:
                self.clip.scale(parameters, limited)
            self.optimizer.step()

        if self.clip.norm:  # it needs all gradients before the first step: one more pass through them
            self.chunked.measure(prepare)
            limited = self.limited(norms, batch)
        self.chunked.step(update)

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        return self.chunked.marks.items()
