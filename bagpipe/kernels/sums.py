"""Sums of gradients, row by row, in a fixed order: the plan's numbers, on the host and as tensors.

    gradient[u] = sum(factors[p] * vectors[sources[p]] for p in range(row_starts[u], row_starts[u + 1]))

`vectors` are a rank's bags, for the rows it uses; or what all ranks sent, rank by rank, for the rows it owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["HostSums", "Int32", "RowSums"]

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSums:
    """`RowSums` before they are tensors; k rows, n terms.

    Attributes:
        row_starts: int32 ``[k + 1]``, where each row's terms start.
        sources: int32 ``[n]``, vector of each term.
        coefficients: ``[n]``, factor of each term (mean: 1 / bag length); None: all ones.
        occurrences: int32 ``[n]``, occurrence (as in the plan) of each term; weighted runs only.
    """

    row_starts: Int32
    sources: Int32
    coefficients: NDArray[np.float64] | None = None
    occurrences: Int32 | None = None

    def select(self, rows: NDArray[np.int64]) -> HostSums:
        """The sums of these rows, in this order."""
        lengths = np.diff(self.row_starts)[rows]
        row_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(lengths, out=row_starts[1:])
        terms = np.repeat(self.row_starts[rows] - row_starts[:-1], lengths)
        terms += np.arange(len(terms), dtype=np.int32)
        return HostSums(
            row_starts=row_starts,
            sources=self.sources[terms],
            coefficients=None if self.coefficients is None else self.coefficients[terms],
            occurrences=None if self.occurrences is None else self.occurrences[terms],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSums:
    """Which vectors are summed for each row: `HostSums` on the device.

    Attributes:
        row_starts: int32 ``[k + 1]``, on the host.
        row_offsets: int32 ``[k + 1]``, the same on the device.
        sources: int32 ``[n]``.
        coefficients: ``[n]`` in the run's dtype, or None.
        occurrences: int32 ``[n]``, or None.
    """

    row_starts: Int32
    row_offsets: Tensor
    sources: Tensor
    coefficients: Tensor | None
    occurrences: Tensor | None

    def __len__(self) -> int:
        return len(self.row_starts) - 1
