"""`RowDecay`: the part of a loop that notes how rows decay, batch by batch (`bagpipe.cache.row_history`).

    lookup of b, once its rates are known    settings of b's updates + what its rows have missed; then b is noted
    checkpoint before b                      the factors of all batches before

Listed after the parts that set rates. A batch that is left out (`run.nonfinite = skip`) decays all rows as one without
gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from bagpipe.cache.lookup_layout import LookupLayout
from bagpipe.cache.row_cache import RowCache
from bagpipe.kernels.interface import step_of
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["RowDecay", "with_decay"]


class RowDecay(LoopPart):
    """Notes the decay of the rows of one cache.

    Args:
        cache: the rows.
        layout: table groups.
    """

    def __init__(self, cache: RowCache, layout: LookupLayout) -> None:
        self.name = cache.history.name
        self._history = cache.history
        self._layout = layout
        self._run: LoopRun

    def hooks(self) -> Iterable[Hook]:
        yield Hook(at=Point.LOOKUP, when="before", call=self._note)

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._history.begin(self._layout, run.first_batch)

    def tensors(self, chunk: str, step: int) -> Mapping[str, Tensor]:
        return self._history.state(step)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._history.load(tensors)

    def _note(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        batch.row_steps = tuple(
            dataclasses.replace(
                step_of(batch.row_steps, group.index), missed=self._history.missed(group.first_table, b)
            )
            for group in self._layout.groups
        )
        self._history.note(self._layout, batch.row_steps)


def with_decay(parts: Sequence[LoopPart], cache: RowCache, layout: LookupLayout) -> tuple[LoopPart, ...]:
    """The parts, and a last one that notes the decay of rows, if any decay and no part does so."""
    if not cache.history.decaying or any(isinstance(part, RowDecay) for part in parts):
        return tuple(parts)
    return (*parts, RowDecay(cache, layout))
