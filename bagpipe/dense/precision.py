"""`Precision`: what the dense part is computed in. Parameters, optimizer state, rows and loss stay as they are.

    vectors, dense inputs, parameters (float32) ──autocast──> matrix products in bfloat16 or float16 ──> logits
    loss * scale ──backward──> gradients * scale (float32 where they leave) ──/ scale──> optimizers

A scale is a power of two: multiplied into the gradient of the loss, and divided out of the gradients of parameters and
rows, it changes their exponents and no other bit, unless a number leaves the range of its type. A gradient that leaves
float16's at the top is infinite, and the guard sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagpipe.cache.lookup import ActiveRun

__all__ = ["AUTOCAST_DTYPES", "DEFAULT_LOSS_SCALE", "Precision"]

#: `run.autocast` -> dtype of matrix products; None: as the operands are.
AUTOCAST_DTYPES: Mapping[str, torch.dtype | None] = {
    "off": None,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

#: By `run.autocast`. float16 ends at 65,504, and its normal numbers begin at 2^-14. The loss is a mean: with a scale of
#: 4,096 a weight's gradient fits for activations up to 32 (half of 4,096 times 32), and the gradient of an example's
#: logit in a batch of 65,536 is 2^10 above the smallest normal number. bfloat16 has float32's range.
DEFAULT_LOSS_SCALE: Mapping[str, int] = {"off": 1, "bfloat16": 1, "float16": 4096}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How the dense part is computed.

    Attributes:
        device_type: ``cpu`` or ``cuda``.
        autocast_dtype: of matrix products; None: that of their operands.
        loss_scale: a power of two.
    """

    device_type: str = "cpu"
    autocast_dtype: torch.dtype | None = None
    loss_scale: float = 1.0

    @property
    def hint(self) -> str:
        """What may help where a gradient is not finite, for an error's message; empty: nothing here."""
        if self.loss_scale == 1:
            return ""
        return f"; gradients are multiplied by run.loss_scale = {self.loss_scale:g}: a smaller one may do"

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward, in the calling thread."""
        if self.autocast_dtype is None:
            return nullcontext()
        # torch keeps parameters it has cast in one place for all threads, and any thread that leaves autocast empties
        # it. Whether a parameter used twice is cast once or twice decides in which dtype its gradients are added, so
        # with the cache the bits would depend on what other lanes do.
        return torch.autocast(self.device_type, dtype=self.autocast_dtype, cache_enabled=False)

    def root_gradient(self, loss: Tensor) -> Tensor:
        """What the backward of a loss starts from: the scale, as a scalar like the loss."""
        return torch.full_like(loss, self.loss_scale)

    def unscale_rows(self, runs: Sequence[ActiveRun]) -> None:
        """Divide the scale out of the gradients that backward has delivered to the rows."""
        if self.loss_scale == 1:
            return
        for run in runs:
            # Not in place: two runs may hold the same tensor.
            run.gradients[:] = [(vectors * (1 / self.loss_scale), weights) for vectors, weights in run.gradients]

    def unscale_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Divide the scale out of the gradients of parameters, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.loss_scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / self.loss_scale)
