"""`ChunkedDense`: the whole model, with parameters, gradients and optimizer state in chunks under a byte budget.

    F  forward, units come one after another    B  gradients go to their chunks    OPT  chunk by chunk

The same operators in the same order as `WholeDense`, on the same values: the same bits. Only where gradients are
looked at or limited differs: each while it is on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from bagpipe.dense.chunks.chunked_model import Budget, ChunkedModel
from bagpipe.errors import InputError
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
        InputError: the norm of gradients has a limit, several ranks have devices, or see `ChunkedModel`.
    """

    def __init__(self, *, budget: Budget, streams: Streams, **settings: Any) -> None:
        super().__init__(**settings)
        self._has_replicas = settings.get("replicas") is not None
        if self.clip.norm:
            raise InputError(
                "a limit of the gradients' norm is not possible with chunks: it needs all gradients at once"
            )
        if self._has_replicas and streams.is_async:
            raise InputError(
                "chunks of the dense part are not possible on several ranks with CUDA devices: use run.device cpu"
            )
        self.chunked = ChunkedModel(self.model, self.optimizer, budget, streams)

    def start(self, run: LoopRun) -> None:
        super().start(run)
        self.chunked.start()

    def end(self) -> None:
        super().end()
        self.chunked.end()

    def settle(self) -> None:
        self.chunked.settle()

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
            self.chunked.show_gradients()
            super().step(b)
        self.chunked.finish()

    def update(self, batch: InFlightBatch) -> None:
        if self._has_replicas:
            self.chunked.take_shown()

        def update(parameters: Sequence[nn.Parameter]) -> None:
            self.loss_scale.unscale_parameters(parameters)
            self.limit(parameters, batch)
            self.optimizer.step()

        self.chunked.step(update)

    def checked_gradients(self, point: Point, key: OpKey) -> Iterable[tuple[str, Tensor]]:
        return self.chunked.marks.items()
