"""L2 decay of rows: every row has the gradient ``decay * w`` at every step, and the whole update of its optimizer.

    settings of all batches ──L2Table.append──> table
    rows at different steps, sorted ──step after step, those at it or before──> rows at one step

Momentum and the adaptive optimizers have no closed form for many steps, so the missed updates are made one after the
other, of all rows at once. The cost of a batch grows with the largest number of steps that one of its rows has missed.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.kernels.interface import RowStep
from bagpipe.kernels.row_optimizer import ROW_OPTIMIZERS

__all__ = ["L2Table"]

#: Numbers of a step that a checkpoint keeps, in this order.
_NUMBERS = ("lr", "eps", "step", "momentum", "weight_decay")


class L2Table:
    """Settings of the batches so far, of rows of one optimizer. See `bagpipe.kernels.row_decay.MissedSteps`.

    Args:
        optimizer: name, a key of `ROW_OPTIMIZERS`.
        numbers: float64 ``[n, 5]``, of the batches so far, as of `state`.
    """

    def __init__(self, optimizer: str, numbers: NDArray[np.float64] | None = None) -> None:
        self._apply = ROW_OPTIMIZERS[optimizer].apply
        self._steps: list[RowStep] = []
        for lr, eps, step, momentum, decay in [] if numbers is None else numbers.tolist():
            self.append(RowStep(lr=lr, eps=eps, step=int(step), momentum=momentum, weight_decay=decay))

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def needs_state(self) -> bool:
        return True

    def append(self, step: RowStep) -> None:
        """Add the settings of the next batch."""
        self._steps.append(step)

    def state(self, num_steps: int) -> NDArray[np.float64]:
        """float64 ``[num_steps, 5]``."""
        rows = [[getattr(step, name) for name in _NUMBERS] for step in self._steps[:num_steps]]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(_NUMBERS))

    def apply(self, rows: Tensor, dim: int, steps: Tensor, until: int) -> None:
        """See `bagpipe.kernels.row_decay.Missed.apply`. On a CPU."""
        if not len(rows):
            return
        order = torch.argsort(steps, stable=True)
        at, moved = steps[order], rows[order]
        first = int(at[0])
        counts = torch.searchsorted(at, torch.arange(first, until), right=True).tolist()
        for step, count in zip(self._steps[first:until], counts, strict=True):
            part = moved[:count, :-1]
            self._apply(part, part[:, :dim] * step.weight_decay, step)
        rows[:, :-1].index_copy_(0, order, moved[:, :-1])
