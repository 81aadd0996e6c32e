"""`MicroLookups`: lookups of the micro-batches of a whole model (`WholeDense`).

batch's rows ──_select──> those of a micro-batch, before its forward      gradients of all ──_join──> of the batch
"""

from __future__ import annotations

from collections.abc import Iterable

from bagpipe.cache.lookup import ActiveBatch
from bagpipe.cache.micro_batches import active_parts, join_gradients
from bagpipe.cache.row_cache import RowCache
from bagpipe.errors import JobError
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["MicroLookups"]


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
