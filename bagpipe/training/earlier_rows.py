"""`KeptRows`: the part of a loop that keeps rows as they were before the latest update, for checkpoints.

    before the row update of b       weights of its rows ──> `EarlierRows`          lanes compute, push
    a checkpoint before b + 1        those of this rank
    the first batch of a resumed job reads them

Needed where a lookup leaves the update of the batch before out (`pipeline.rows_delay`): the rows in the store have it.
On a device the lane that copies what both have kept waits there for the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bagpipe.cache.row_cache import RowCache
from bagpipe.pipeline.stream import Event, keep_for_current_stream
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["KeptRows"]


class KeptRows(LoopPart):
    """Keeps the rows that one rank updates.

    Args:
        cache: the rows.
        rank: this rank.
    """

    name = "earlier_rows"
    keeps_rows = True

    def __init__(self, cache: RowCache, rank: int) -> None:
        self._cache = cache
        self._rank = rank
        self._read: dict[str, Event | None] = {}  # by share, after the reads of its lane
        self._run: LoopRun

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.UPDATE, when="before", call=self._keep)

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._cache.earlier.begin(run.first_batch)

    def row_tensors(self) -> Mapping[str, Tensor]:
        here = self._cache.streams.here()
        for event in filter(None, self._read.values()):
            here.wait(event)
        found = {f"{self._rank}.{name}": tensor for name, tensor in self._cache.earlier.tensors().items()}
        for tensor in found.values():
            keep_for_current_stream(tensor)
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._cache.earlier.load(tensors)

    def _keep(self, key: OpKey, b: int) -> None:
        cache, share = self._cache, key[1]
        for group in self._run.in_flight[b].context.groups:
            if group.tables.is_frozen:
                continue
            if group.exchange is None:
                updated = group.local
            else:
                updated = (group.exchange.push_late if share == "X_UPDATE_LATE" else group.exchange.push).owned
            assert updated is not None, "the rows are here, or exchanged"
            dtype = cache.row_dtype(group.tables)
            weights = torch.empty(len(updated.rows), group.tables.dim, dtype=dtype, device=cache.device)
            cache.read(group.tables, updated.slot_index, weights)
            cache.earlier.keep(share, group.tables.index, updated.rows, weights)
        self._read[share] = cache.streams.here().record()
