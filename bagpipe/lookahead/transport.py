"""`RankTransport`: bytes between rank 0 and the other ranks, over one group. Every rank makes every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bagpipe.distributed.interface import RankGroup

__all__ = ["RankTransport"]


class RankTransport:
    """Moves numbers and bytes. Every call raises `PeerError` like those of the group.

    Args:
        group: all ranks, on the host.

    Attributes:
        rank, world_size: those of the group.
    """

    def __init__(self, group: RankGroup) -> None:
        self.rank = group.rank
        self.world_size = group.world_size
        self._group = group

    def share_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers. The other ranks give as many, of any value."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._group.broadcast(tensor)
        return [int(number) for number in tensor.tolist()]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by rank; equally many each."""
        output = torch.empty(self.world_size * len(numbers), dtype=torch.int64)
        self._group.all_gather(output, torch.tensor(numbers, dtype=torch.int64))
        rows: list[list[int]] = output.reshape(self.world_size, -1).tolist()
        return rows

    def share_bytes(self, data: bytes, size: int) -> bytearray:
        """Rank 0's bytes; `size` is known to all ranks."""
        found = bytearray(data) if self.rank == 0 else bytearray(size)
        self._group.broadcast(_tensor(found))
        return found

    def gather_bytes(self, parts: Sequence[Any], sizes: Sequence[int]) -> list[bytearray]:
        """Every rank's bytes at rank 0, by rank, rank 0's own left out; [] elsewhere.

        Args:
            parts: buffers to join.
            sizes: bytes of each rank, known to all.
        """
        if self.rank:
            self._exchange(bytearray().join(parts), [0] * self.world_size, [sizes[self.rank], *self._zeros])
            return []
        found = [bytearray(size) for size in (0, *sizes[1:])]
        whole = self._exchange(bytearray(), [0, *sizes[1:]], [0, *self._zeros])
        start = 0
        for data in found:
            data[:] = whole[start : start + len(data)]
            start += len(data)
        return found

    def scatter_bytes(self, frames: Sequence[Sequence[Any]], sizes: Sequence[int]) -> bytearray:
        """This rank's bytes from rank 0; empty at rank 0.

        Args:
            frames: at rank 0, by rank: buffers to join; rank 0's own are not sent.
            sizes: bytes for each rank, known to all; 0 for rank 0.
        """
        if self.rank:
            return self._exchange(bytearray(), [sizes[self.rank], *self._zeros], [0] * self.world_size)
        joined = bytearray().join(part for parts in frames[1:] for part in parts)
        return self._exchange(joined, [0] * self.world_size, sizes)

    @property
    def _zeros(self) -> list[int]:
        return [0] * (self.world_size - 1)

    def _exchange(self, given: bytearray, taken_sizes: Sequence[int], given_sizes: Sequence[int]) -> bytearray:
        taken = bytearray(sum(taken_sizes))
        self._group.all_to_all(_tensor(taken), _tensor(given), taken_sizes, given_sizes)
        return taken


def _tensor(data: bytearray) -> torch.Tensor:
    """The bytes as a tensor that shares their memory."""
    return torch.from_numpy(np.frombuffer(data, np.uint8))
