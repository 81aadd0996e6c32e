"""`Precision`: dtypes of the dense part's computation. Parameters, optimizer state, rows and loss keep theirs.

    vectors, dense inputs, parameters (float32) ──autocast──> matrix products in bfloat16 or float16 ──> logits
    loss * scale ──backward──> gradients * scale (float32 where they leave) ──/ scale──> optimizers

`LossScale` defines how the scale changes; this module defines its initial value.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bagpipe.dense.loss_scale import LossScale

__all__ = ["AUTOCAST_DTYPES", "DEFAULT_LOSS_SCALE", "Precision"]

#: `run.autocast` -> dtype of matrix products; None: the dtype of the operands.
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
    """Dtypes of the dense part's computation.

    Attributes:
        device_type: ``cpu`` or ``cuda``.
        autocast_dtype: dtype of matrix products; None: the dtype of the operands.
        loss_scale: loss scale of the first batch.
    """

    device_type: str = "cpu"
    autocast_dtype: torch.dtype | None = None
    loss_scale: LossScale = field(default_factory=LossScale)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward, in the calling thread."""
        if self.autocast_dtype is None:
            return nullcontext()
        # Without torch's weight cache: all threads share it, and any thread that leaves autocast clears it. A parameter
        # used twice would be cast once or twice depending on other lanes, and its gradients added in another dtype.
        return torch.autocast(self.device_type, dtype=self.autocast_dtype, cache_enabled=False)
