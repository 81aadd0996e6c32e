"""`Uploader`: a batch's host arrays as tensors of one device; and rows with their slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.kernels.sums import HostSums, Int32, RowSums
from bagpipe.oracle.plan import RowList

__all__ = ["SlotRows", "Uploader"]


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
