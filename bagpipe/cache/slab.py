"""`Slab`: the tensor of row records, one slot a row. Copies rows in and out; knows nothing of tables.

slot ──> [weights | optimizer state | unused]        records narrower than the slab use a prefix
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Scratch", "Slab"]

#: Slots start on multiples of this, so that rows can be copied 16 bytes at a time.
_ALIGN_BYTES = 16


class Slab:
    """Row records of `num_slots` slots.

    Args:
        num_slots: slots.
        width: elements of the widest record.
        dtype: the run's dtype.
        device: where the records live.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        align = _ALIGN_BYTES // dtype.itemsize
        # Not zeroed: the pages of a large cache are touched when rows enter them.
        self._records = torch.empty(num_slots, -(-width // align) * align, dtype=dtype, device=device)

    def __len__(self) -> int:
        return int(self._records.shape[0])

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots; records stay in their slots. Wants nobody else at work."""
        old = self._records
        if num_slots > len(self):
            self._records = old.new_empty(num_slots, old.shape[1])
            self._records[: len(old)].copy_(old)

    def gather(self, slots: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """The first `width` elements of the records in `slots` (int64 ``[n]``): ``[n, width]``, new or `out`."""
        return torch.index_select(self._records[:, :width], 0, slots, out=out)

    def scatter(self, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` ``[n, width]`` to the front of the records in `slots` (int64 ``[n]``, distinct)."""
        records = self._records[:, : rows.shape[1]]
        if rows.shape[1] * rows.element_size() % _ALIGN_BYTES == 0:
            # Copied as 16-byte elements: 1.4 times as fast as element by element (30,000 rows of 512 bytes, one core).
            records, rows = records.view(torch.complex128), rows.view(torch.complex128)
        records.index_copy_(0, slots, rows)


class Scratch:
    """A buffer used again by every batch: fresh memory of many megabytes costs more in page faults than in copying.

    One owner, one use at a time.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, dtype=dtype, device=device)

    def take(self, num_rows: int, width: int) -> Tensor:
        """``[num_rows, width]``, contents undefined; what was taken before is no longer valid."""
        size = num_rows * width
        if size > len(self._buffer):
            self._buffer = self._buffer.new_empty(size + size // 4)  # batches differ a little in size
        return self._buffer[:size].view(num_rows, width)
