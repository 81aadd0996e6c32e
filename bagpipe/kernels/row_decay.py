"""Decoupled decay of rows: all rows are multiplied by ``1 - lr * decay`` at every step, each when it is next used.

    rates of all batches ──DecayTable.append──> running product of their factors, by step
    row at step a, used at step b ──product b / product a──> factor of the steps it missed ──> weights

Rule of this file: *a factor is a quotient of two entries of a table*, so it depends on the two steps alone: not on the
device, on other rows, or on where the job was resumed. A running product has a mantissa and an exponent of its own,
because it gets smaller than any float64. The rounding error of a factor is that of multiplying step by step.

The step that a row is at is the last number of its state, an integer of as many bits: zero in a new row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.errors import InputError

__all__ = ["DecayTable", "Missed", "MissedSteps", "decay_factor", "row_steps", "set_row_steps"]

#: Integers of the size of a number of state.
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}

_FIRST_SIZE = 1024
_EXPONENT_BIAS, _LEAST_EXPONENT = 1023, -1022  # of float64
_MANTISSA_BITS = 52


def decay_factor(lr: float, weight_decay: float) -> float:
    """Factor of the weights of one step.

    Raises:
        InputError: it is not above 0.
    """
    factor = 1.0 - lr * weight_decay
    if not 0.0 < factor <= 1.0:
        raise InputError(
            f"rows decay by 1 - rate * decay at every step: expected a product below 1, got {lr:g} * {weight_decay:g}"
        )
    return factor


class DecayTable:
    """Running product of the decay factors of the batches so far.

    One thread appends. Other threads read entries whose batches they know to be appended.

    Args:
        device: device of the rows.
        factors: float64 ``[n]``, of the batches so far.
    """

    def __init__(self, device: torch.device, factors: NDArray[np.float64] | None = None) -> None:
        self._factors: list[float] = []
        self._mantissa, self._exponent = 0.5, 1  # of the product so far: 1
        self._mantissas = torch.full((_FIRST_SIZE,), self._mantissa, dtype=torch.float64, device=device)
        self._exponents = torch.full((_FIRST_SIZE,), self._exponent, dtype=torch.int64, device=device)
        if factors is not None:
            mantissas, exponents = [self._mantissa], [self._exponent]
            for factor in factors.tolist():
                self._multiply(factor)
                mantissas.append(self._mantissa)
                exponents.append(self._exponent)
            self._grow(len(mantissas))
            self._mantissas[: len(mantissas)] = torch.tensor(mantissas, dtype=torch.float64, device=device)
            self._exponents[: len(exponents)] = torch.tensor(exponents, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._factors)

    def append(self, factor: float) -> None:
        """Add a batch with a factor of `decay_factor`."""
        self._multiply(factor)
        self._grow(len(self) + 1)
        self._mantissas[len(self)].fill_(self._mantissa)
        self._exponents[len(self)].fill_(self._exponent)

    @property
    def needs_state(self) -> bool:
        return False

    def state(self, num_steps: int) -> NDArray[np.float64]:
        """float64 ``[num_steps]``: the factors of the first batches."""
        return np.array(self._factors[:num_steps], dtype=np.float64)

    def apply(self, rows: Tensor, dim: int, steps: Tensor, until: int) -> None:
        """See `Missed.apply`."""
        factors = self.missed(steps.to(self._mantissas.device), until)  # rows that are read can be on the host
        rows[:, :dim].mul_(factors.to(rows.device, rows.dtype)[:, None])

    def missed(self, steps: Tensor, until: int) -> Tensor:
        """float64 ``[n]``: product of the factors from `steps` (int64 ``[n]``) to `until`.

        Does not wait for the device. Rows at `until` have the factor 1. Products below the range of float64 are 0.
        """
        ratio = self._mantissas[until : until + 1] / self._mantissas[steps]
        exponent = self._exponents[until : until + 1] - self._exponents[steps]
        power = (exponent.clamp(min=_LEAST_EXPONENT) + _EXPONENT_BIAS << _MANTISSA_BITS).view(torch.float64)
        return torch.where(exponent < _LEAST_EXPONENT, torch.zeros_like(ratio), ratio * power)

    def _multiply(self, factor: float) -> None:
        self._mantissa, more = math.frexp(self._mantissa * factor)
        self._exponent += more
        self._factors.append(factor)

    def _grow(self, size: int) -> None:
        # New tensors: other threads may read the old ones.
        while len(self._mantissas) < size:
            self._mantissas = torch.cat([self._mantissas, torch.empty_like(self._mantissas)])
            self._exponents = torch.cat([self._exponents, torch.empty_like(self._exponents)])


class MissedSteps(Protocol):
    """The decay of a table group since batch 0, batch by batch."""

    @property
    def needs_state(self) -> bool:
        """The decay changes the optimizer state of rows, not the weights alone."""
        ...

    def __len__(self) -> int:
        """Number of batches."""
        ...

    def state(self, num_steps: int) -> NDArray[np.float64]:
        """Numbers of the first batches, for a checkpoint."""
        ...

    def apply(self, rows: Tensor, dim: int, steps: Tensor, until: int) -> None:
        """See `Missed.apply`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Missed:
    """The decay of a table group's rows up to a batch. A row has missed the part after its last update.

    Attributes:
        table: of the group.
        until: number of the batch, from 0.
    """

    table: MissedSteps
    until: int

    def apply(self, rows: Tensor, dim: int, steps: Tensor) -> None:
        """Bring rows up to the batch, in place.

        Args:
            rows: weights ``[n, >= dim]``; with their state ``[n, dim + state + 1]`` if the table needs it.
            dim: weights per row.
            steps: int64 ``[n]``, the steps that the rows are at.
        """
        self.table.apply(rows, dim, steps, self.until)


def row_steps(records: Tensor, column: int) -> Tensor:
    """The steps that rows are at: a view ``[n]`` of column `column` of records ``[n, >= column + 1]``, as integers."""
    return records.view(_INTEGER[records.dtype])[:, column]


def set_row_steps(records: Tensor, column: int, step: int) -> None:
    """Note that rows are at a step."""
    row_steps(records, column).fill_(step)
