"""`PoisonedArena`: overwrites every byte that nobody may read, so that a wrong place shows as a NaN."""

from __future__ import annotations

import torch
from torch import Tensor

from bagpipe.dense.chunks.arena import Arena

__all__ = ["PoisonedArena"]

_NAN = 0xFF


class PoisonedArena(Arena):
    """A slot is overwritten when its chunk has left, a home while its chunk is on the device."""

    def come(self, chunk: int) -> None:
        super().come(chunk)
        assert self.held_bytes <= self.num_slots * self.chunk_bytes
        if chunk not in self.dead:
            self._fill(self._homes[chunk])
            self.changed.add(chunk)

    def leave(self, chunk: int) -> None:
        slot = self._slots[self._slot_of[chunk]]
        super().leave(chunk)
        self._fill(slot)

    def _fill(self, memory: Tensor) -> None:
        self.lane.order("host", -1, memory, torch.full_like(memory, _NAN))
