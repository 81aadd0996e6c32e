"""`LabelRange`: the labels that a loss is defined for. `LOSS_LABELS`: those of the loss of this package.

The loss (`bagpipe.dense.loss`) needs torch and readers have none, so the range stands here. `data.checked_read` refuses
rows with other labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOSS_LABELS", "LabelRange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelRange:
    """Labels from `low` to `high`, both included."""

    low: float
    high: float

    def outside(self, labels: NDArray[np.float32]) -> NDArray[np.int64]:
        """int64, ascending positions of the labels ``[n]`` that are not in the range. NaN is in no range."""
        return np.flatnonzero(~((labels >= self.low) & (labels <= self.high)))

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"


#: Binary cross-entropy: a label is a probability, for example 0 or 1. The loss of any other label is unbounded below.
LOSS_LABELS = LabelRange(low=0, high=1)
