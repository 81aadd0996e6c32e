"""`Arena`: slots on the device and homes on the host for chunks, and the lane that copies between them.

    home (host memory, one per chunk) ──come──> slot (device memory, budget / chunk bytes of them)
                                      <─leave──

`come` and `leave` only order moves: the copy lane makes them in this order, each after the work enqueued before. `use`
waits for those of a chunk, and points its tensors into the slot; `leave` points them to the home, whose bytes are right
once the lane has got there (`settle`). The slots are all the device memory that there is for chunks, so their bytes
never exceed the budget. On a CPU the "device" is a part of host memory with the same accounting.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bagpipe.dense.chunks.layout import ALIGN_BYTES
from bagpipe.pipeline.copy_lane import CopyLane, Order
from bagpipe.pipeline.stream import Streams

__all__ = ["Arena", "Part"]

#: Moves of a slot that can be ordered and not made, at most: one out, one in, and as many of the next batch.
_MOVES_OF_SLOT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor's part of a chunk.

    Attributes:
        chunk: its number.
        offset_bytes: in the chunk.
        dtype, shape, stride: of the tensor.
    """

    chunk: int
    offset_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, chunk: int, offset_bytes: int) -> Part:
        return cls(chunk, offset_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def at(self, memory: Tensor) -> Tensor:
        """The tensor in the memory of the chunk, uint8 ``[chunk_bytes]``."""
        flat = memory.view(self.dtype)
        first = flat.storage_offset() + self.offset_bytes // self.dtype.itemsize
        return torch.as_strided(flat, self.shape, self.stride, first)


class _Homes(dict[int, Tensor]):
    """Host memory of chunks, by number; made when a chunk is first asked for, as many have nothing to keep.

    Attributes:
        memory: addresses.
    """

    def __init__(self, streams: Streams, chunk_bytes: int) -> None:
        super().__init__()
        self.memory: set[int] = set()
        self._make = partial(streams.memory, chunk_bytes)

    def __missing__(self, chunk: int) -> Tensor:
        home: Tensor = self._make()
        self[chunk] = home
        self.memory.add(home.untyped_storage().data_ptr())
        return home


class Arena:
    """See above. Not thread-safe: moves are ordered by one thread at a time.

    Args:
        chunk_bytes: size of each chunk, a multiple of the alignment.
        num_slots: chunks that the device can hold.
        device: of the slots.
        streams: of the device.
        name: of the copy lane.

    Attributes:
        lane: copies chunks.
        changed: chunks on the device whose home has other bytes.
        dead: chunks whose bytes nobody reads again; they are not copied.
        peak_bytes: most bytes of chunks that were on the device.
    """

    def __init__(
        self,
        chunk_bytes: int,
        num_slots: int,
        *,
        device: torch.device,
        streams: Streams,
        name: str = "chunks",
    ) -> None:
        assert chunk_bytes % ALIGN_BYTES == 0, chunk_bytes
        self.chunk_bytes = chunk_bytes
        self.num_slots = num_slots
        self.changed: set[int] = set()
        self.dead: set[int] = set()
        self.peak_bytes = 0
        self.lane = CopyLane(streams, _MOVES_OF_SLOT * num_slots, name)
        self._streams = streams
        self._homes = _Homes(streams, chunk_bytes)
        self._memory = torch.empty(num_slots * chunk_bytes, dtype=torch.uint8, device=device)
        self._slots = self._memory.view(num_slots, chunk_bytes)
        self._free = deque(range(num_slots))
        self._slot_of: dict[int, int] = {}
        self._chunk_in: dict[int, int] = {}
        self._coming: dict[int, Order] = {}
        self._tensors: dict[int, dict[int, tuple[Tensor, Part]]] = defaultdict(dict)  # by identity

    @property
    def held(self) -> frozenset[int]:
        """Chunks on the device, or on their way to it."""
        return frozenset(self._slot_of)

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that chunks occupy."""
        return len(self._slot_of) * self.chunk_bytes

    @property
    def has_room(self) -> bool:
        """A slot is free."""
        return bool(self._free)

    def place(self, tensor: Tensor, part: Part) -> None:
        """Have a tensor's memory be a part of a chunk, wherever that goes. Its values are copied there, if they differ.

        The tensor keeps its identity; its `data` changes.
        """
        chunk = part.chunk
        if chunk in self._slot_of:
            self.use(chunk, writes=True)
        target = part.at(self._memory_of(chunk))
        if target.data_ptr() != tensor.data_ptr():
            target.copy_(tensor.detach())
        tensor.data = target
        self._tensors[chunk][id(tensor)] = (tensor, part)
        self.dead.discard(chunk)

    def release(self, chunk: int) -> None:
        """The tensors of a chunk do not follow it any more."""
        self._tensors.pop(chunk, None)

    def drop(self, chunk: int) -> None:
        """Nobody reads the bytes of a chunk again, and it has no tensors."""
        self.release(chunk)
        self.dead.add(chunk)
        self.changed.discard(chunk)

    def come(self, chunk: int) -> None:
        """Order a chunk to a free slot."""
        slot = self._free.popleft()
        self._slot_of[chunk], self._chunk_in[slot] = slot, chunk
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        home = None if chunk in self.dead else self._homes[chunk]
        # Without a copy it still waits for the bytes that leave the slot.
        self._coming[chunk] = self.lane.order("device", chunk, self._slots[slot], home)

    def leave(self, chunk: int) -> None:
        """Order a chunk home."""
        slot = self._slot_of.pop(chunk)
        self._coming.pop(chunk, None)
        if chunk in self.changed and chunk not in self.dead:
            self.lane.order("host", chunk, self._homes[chunk], self._slots[slot])
        self.changed.discard(chunk)
        self._free.append(slot)
        self._point(chunk)

    def use(self, chunk: int, *, writes: bool = False) -> None:
        """Have the current stream's later work find a chunk in its slot."""
        order = self._coming.pop(chunk, None)
        if order is not None:
            order.wait(self._streams.here())
            self._point(chunk)
        if writes:
            self.changed.add(chunk)

    def settle(self) -> None:
        """Make every move that is ordered, so that all tensors can be read and written where they are."""
        for chunk in tuple(self._coming):
            self.use(chunk)
        self.lane.settle()

    def go_home(self) -> None:
        """Bring every chunk home, and wait for it."""
        for chunk in tuple(self._slot_of):
            self.leave(chunk)
        self.settle()

    def find(self, tensor: Tensor) -> tuple[int, int] | None:
        """Chunk on the device and byte in it at which a tensor begins; None: it lies elsewhere.

        Raises:
            LookupError: it lies in a chunk's home.
        """
        memory = tensor.untyped_storage().data_ptr()
        if memory in self._homes.memory:
            raise LookupError
        if memory != self._memory.untyped_storage().data_ptr():
            return None
        slot, offset = divmod(int(tensor.storage_offset()) * tensor.itemsize, self.chunk_bytes)
        return self._chunk_in[slot], offset

    def view(self, part: Part) -> Tensor:
        """A part of a chunk that is on the device, and used."""
        return part.at(self._slots[self._slot_of[part.chunk]])

    def _memory_of(self, chunk: int) -> Tensor:
        slot = self._slot_of.get(chunk)
        return self._homes[chunk] if slot is None else self._slots[slot]

    def _point(self, chunk: int) -> None:
        """Have the tensors of a chunk lie where it is."""
        if tensors := self._tensors.get(chunk):
            memory = self._memory_of(chunk)
            for tensor, part in tensors.values():
                tensor.data = part.at(memory)
