"""`Slab`: the tensor of row records, one slot a row. Knows nothing of tables.

slot ──> [weights | optimizer state | unused]        records narrower than the slab use a prefix
"""

from __future__ import annotations

import torch
from torch import Tensor

from bagpipe.kernels.torch_kernels import ALIGN_BYTES

__all__ = ["Scratch", "Slab", "record_bytes"]


def record_bytes(row_bytes: int) -> int:
    """Bytes of a slot for records of so many bytes."""
    return -(-row_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Slab:
    """Row records of `num_slots` slots.

    Args:
        num_slots: slots.
        width: elements of the widest record.
        dtype: of the weights (`bagpipe.kernels.row_format`).
        device: where the records live.

    Attributes:
        records: ``[num_slots, >= width]``; slots start on multiples of 16 bytes, so that rows can be copied so.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # Not zeroed: the pages of a large cache are touched when rows enter them.
        self.records = torch.empty(
            num_slots, record_bytes(width * dtype.itemsize) // dtype.itemsize, dtype=dtype, device=device
        )

    def __len__(self) -> int:
        return int(self.records.shape[0])

    def grow(self, num_slots: int) -> None:
        """Make room for at least `num_slots` slots; records stay in their slots. Wants nobody else at work."""
        old = self.records
        if num_slots > len(self):
            self.records = old.new_empty(num_slots, old.shape[1])
            self.records[: len(old)].copy_(old)


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
