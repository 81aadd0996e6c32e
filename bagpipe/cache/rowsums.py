"""Sums of gradients, row by row, in a fixed order; and rows with their slots. The plan's numbers as tensors.

    gradient[u] = sum(factors[p] * vectors[sources[p]] for p in range(row_starts[u], row_starts[u + 1]))

`vectors` are a rank's bags, for the rows it uses; or what all ranks sent, rank by rank, for the rows it owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.oracle.plan import RowList

__all__ = [
    "HostSums",
    "Int32",
    "RowSums",
    "SlotRows",
    "Uploader",
    "rows_of_tables",
    "segment_sum",
    "sum_rows",
    "table_rows",
]

Int32 = NDArray[np.int32]
_MODE_NUMBER = {"sum": 0, "mean": 1}  # torch.embedding_bag's own numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotRows:
    """Rows in this rank's cache.

    Attributes:
        rows: the rows, on the host.
        slots: int32 ``[len(rows)]``, on the host.
        slot_index: int64 ``[len(rows)]``, the same on the device.
    """

    rows: RowList
    slots: Int32
    slot_index: Tensor


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


def sum_rows(vectors: Tensor, sums: RowSums, first: int, end: int, weights: Tensor | None = None) -> Tensor:
    """``[end - first, dim]``: the sums of rows ``first`` to ``end``, each from its first term to its last.

    Args:
        vectors: ``[num_vectors, dim]``.
        sums: what to sum.
        first, end: rows. They are summed one by one, so blocks of them give the bits of all at once.
        weights: per-id weights by occurrence (as in the plan), in the place of the coefficients; weighted runs only.
    """
    start, stop = int(sums.row_starts[first]), int(sums.row_starts[end])
    offsets = sums.row_offsets[first : end + 1]
    if start:
        offsets = offsets - start
    factors = None if sums.coefficients is None else sums.coefficients[start:stop]
    if weights is not None and sums.occurrences is not None:
        factors = weights.index_select(0, sums.occurrences[start:stop])
    return segment_sum(vectors, sums.sources[start:stop], offsets, factors)


def segment_sum(
    vectors: Tensor, sources: Tensor, offsets: Tensor, factors: Tensor | None = None, mode: str = "sum"
) -> Tensor:
    """``out[i] = sum(factors[p] * vectors[sources[p]] for p in range(offsets[i], offsets[i + 1]))``, in that order."""
    return torch.embedding_bag(
        vectors, sources, offsets, False, _MODE_NUMBER[mode], False, factors, include_last_offset=True
    )[0]


class Uploader:
    """Host arrays to tensors of one device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def indices(self, array: NDArray[np.integer]) -> Tensor:
        """The array as a tensor of its own dtype."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def optional(self, array: NDArray[np.integer] | None) -> Tensor | None:
        return None if array is None else self.indices(array)

    def sums(self, sums: HostSums) -> RowSums:
        coefficients = None if sums.coefficients is None else torch.from_numpy(sums.coefficients)
        return RowSums(
            row_starts=sums.row_starts,
            row_offsets=self.indices(sums.row_starts),
            sources=self.indices(sums.sources),
            coefficients=None if coefficients is None else coefficients.to(self._device, self._dtype),
            occurrences=self.optional(sums.occurrences),
        )

    def slot_rows(self, rows: RowList, slots: Int32) -> SlotRows:
        return SlotRows(rows=rows, slots=slots, slot_index=self.indices(slots.astype(np.int64)))


def rows_of_tables(rows: RowList, first_table: int, end_table: int) -> slice:
    """Positions of the rows of these tables."""
    return slice(int(rows.table_offsets[first_table]), int(rows.table_offsets[end_table]))


def table_rows(rows: RowList, first_table: int, end_table: int) -> RowList:
    """The rows of these tables; table numbers stay, the other tables hold no rows."""
    part = rows_of_tables(rows, first_table, end_table)
    offsets = np.clip(rows.table_offsets - part.start, 0, part.stop - part.start)
    return RowList(table_offsets=offsets, ids=rows.ids[part])
