"""`RowClip`: limits the norm of the gradients of rows, alone or together with those of the parameters. One rank.

    end of the backward of b: gradients of b's rows, summed ──norm──> factor ──> gradients of vectors (and parameters)

The gradient of a row is the sum over the whole batch, as its optimizer sees it, so its norm needs the segment sums,
which the row update computes once more. Both are in the order of the plan's unique rows, which no cache changes.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagpipe.cache.lookup import gradients_of
from bagpipe.dense.clip import Clip
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import DensePart
from bagpipe.training.part import Hook, LoopPart, LoopRun

__all__ = ["RowClip"]


class RowClip(LoopPart):
    """Clips the norm of gradients of rows of one rank, whose dense part is whole.

    Args:
        dense: the dense part.
        clip: the largest norm.
        with_dense: of all gradients together; otherwise of those of the rows.
    """

    def __init__(self, dense: DensePart, clip: Clip, *, with_dense: bool) -> None:
        self._dense = dense
        self._clip = clip
        self._with_dense = with_dense
        self._run: LoopRun

    def hooks(self) -> Iterable[Hook]:
        # Listed after the guard: what is not finite has been found.
        yield Hook(at=Point.GRADIENTS, when="after", call=self._limit)

    def start(self, run: LoopRun) -> None:
        self._run = run

    def _limit(self, key: OpKey, b: int) -> None:
        batch = self._run.in_flight[b]
        if batch.is_skipped:
            return
        groups = [group for group in batch.groups if group.gradients]
        of_rows = [group.kernels.sum(gradients_of(group, 0)) for group in groups]
        of_dense = []
        if self._with_dense:
            of_dense = [p.grad for p in self._dense.parameters.values() if p.grad is not None]
        if not of_rows and not of_dense:
            return
        # Gradients of parameters still have the loss scale, a power of two; those of rows do not.
        scale = self._dense.loss_scale.value
        factor = self._clip.coefficient([*of_rows, *(gradient / scale for gradient in of_dense)])
        for group in groups:
            # Not in place: two groups may hold the same tensor.
            group.gradients[:] = [(vectors * factor, weights) for vectors, weights in group.gradients]
        if of_dense:
            torch._foreach_mul_(of_dense, factor)
