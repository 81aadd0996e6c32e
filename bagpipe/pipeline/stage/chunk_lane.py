"""`ChunkLane`: a compute lane whose stages lie in chunks, and its batch, from the first action to the last step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping

from bagpipe.dense.chunks.chunked_model import ChunkedModel
from bagpipe.pipeline.trace import Trace

__all__ = ["ChunkLane"]


class ChunkLane:
    """A compute lane and its chunks.

    Attributes:
        name: of the lane.
        stages: with parameters.
        pieces, stepped_pieces: numbers in the chunks of each stage's parameters, and of what is stepped in their place.
        chunked: their chunks.
        num_backwards: by stage, of this batch.

    Args:
        stages: and the number of pieces of each: its parameters, and maybe what is stepped in their place.
        trained: the stages that make steps.
        alternates: forwards of a batch can come in the turn before its backwards.
    """

    def __init__(
        self, name: str, stages: Mapping[int, int], trained: Iterable[int], chunked: ChunkedModel, *, alternates: bool
    ) -> None:
        self._alternates = alternates
        self.name = name
        self.stages = tuple(stages)
        ends = [*itertools.accumulate(stages.values())]
        self.stepped_pieces = {stage: end - 1 for stage, end in zip(stages, ends, strict=True)}
        self.pieces = {stage: end - count for (stage, count), end in zip(stages.items(), ends, strict=True)}
        self.chunked = chunked
        self.num_backwards: Counter[int] = Counter()
        self._trained = frozenset(trained)
        self._batch: int | None = None
        self._stepped: set[int] = set()

    def start(self, trace: Trace | None) -> None:
        """A run begins.

        Args:
            trace: records the moves.
        """
        self._batch = None
        self.chunked.start(trace)

    def enter(self, b: int) -> None:
        """An action of batch b comes. A lane does one batch, or turn, after the other, with its steps at the end."""
        if self._batch == b or (self._batch is not None and self._trained):
            return
        if self._batch is not None:
            self.chunked.finish()
        self._batch = b
        self.num_backwards.clear()
        self._stepped.clear()
        self.chunked.begin(goes_on=self._alternates)

    def stepped(self, stage: int) -> None:
        """The step of a stage is done; the last one ends the batch."""
        self._stepped.add(stage)
        if self._stepped == self._trained:
            self._batch = None
            self.chunked.finish()
