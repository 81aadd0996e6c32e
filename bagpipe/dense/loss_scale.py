"""`LossScale`: the factor of all gradients, from the loss to the optimizers.

    loss ──backward, from root_gradient──> gradients * value ──unscale──> optimizers
    scale of batch b, whether b was finite ──after──> scale of batch b + 1

A scale is a power of two: it changes only the exponents of gradients, unless a number leaves the range of its type. A
gradient above float16's range becomes infinite, and the check for non-finite gradients finds it.

A growing scale follows torch's GradScaler: it is halved after a skipped batch, and doubled after `growth_interval`
finite batches in a row, within its limits. It depends only on earlier batches, so it is the same on all ranks. A caller
may keep it (`ScaleHolder`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bagpipe.cache.lookup import ActiveTableGroup

__all__ = ["MAX_LOSS_SCALE", "LossScale", "ScaleHolder"]

#: 2^8 above float16's largest number: a larger scale always overflows.
MAX_LOSS_SCALE = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The scale of one batch.

    Attributes:
        value: a power of two.
        growth_interval: finite batches in a row after which the scale doubles; 0: the scale is constant.
        num_finite: finite batches since the last change or skipped batch.
        least, largest: limits of a growing scale, powers of two.
    """

    value: float = 1
    growth_interval: int = 0
    num_finite: int = 0
    least: float = 1
    largest: float = MAX_LOSS_SCALE

    @property
    def hint(self) -> str:
        """Advice for the error message of a gradient that is not finite; empty if the scale is 1."""
        if self.value == 1:
            return ""
        return f"; gradients are multiplied by run.loss_scale = {self.value}: a smaller one may do"

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next batch.

        Args:
            is_finite: loss and gradients of this batch are finite on all ranks; otherwise it was skipped.
        """
        if not self.growth_interval:
            return self
        if not is_finite:
            half = self.value / 2 if self.value < 2 else self.value // 2
            return dataclasses.replace(self, value=max(half, self.least), num_finite=0)
        if self.num_finite + 1 < self.growth_interval:
            return dataclasses.replace(self, num_finite=self.num_finite + 1)
        return dataclasses.replace(self, value=min(self.value * 2, self.largest), num_finite=0)

    def carried(self) -> Mapping[str, float]:
        """The counters that a checkpoint keeps; none for a constant scale."""
        return {"loss_scale": self.value, "finite_steps": self.num_finite} if self.growth_interval else {}

    def resumed(self, carried: Mapping[str, Any]) -> LossScale:
        """The scale of a resumed job: the checkpoint's if it grows, else this one."""
        if not self.growth_interval or "loss_scale" not in carried:
            return self
        return dataclasses.replace(self, value=carried["loss_scale"], num_finite=carried["finite_steps"])

    def root_gradient(self, loss: Tensor) -> Tensor:
        """The gradient at which the backward of a loss starts: the scale, as a scalar like the loss."""
        return torch.full_like(loss, self.value)

    def unscale_rows(self, groups: Sequence[ActiveTableGroup]) -> None:
        """Divide the scale out of the gradients that backward has delivered to the rows."""
        if self.value == 1:
            return
        for group in groups:
            # Not in place: two groups may hold the same tensor.
            group.gradients[:] = [
                gradient._replace(vectors=gradient.vectors * (1 / self.value)) for gradient in group.gradients
            ]

    def unscale_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Divide the scale out of the gradients of parameters, in place."""
        if self.value == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.value)


class ScaleHolder(Protocol):
    """Holds the scale for a caller, who may read it and set another between two batches."""

    def read(self) -> LossScale:
        """The scale of the next batch."""
        ...

    def write(self, scale: LossScale) -> None:
        """Take the scale of the next batch: after a batch, or from a checkpoint."""
        ...
