"""`ChunkLayout`: tensors of the dense part packed into chunks of one size, in the order of their creation.

    parameters        [ p0 p1 | p2 | p3 p4 p5 ]     chunks 0 … n-1
    gradients         [ the same places       ]     chunks n … 2n-1
    state, by name    [ the same places       ]     n chunks each

A gradient and each state of a parameter have its shape, so they lie at its place in a chunk of their own kind. One step
of an optimizer on parameter chunk k uses chunk k of every kind. (PatrickStar, arXiv:2108.05818, packs alike.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bagpipe.errors import InputError

__all__ = ["ALIGN_BYTES", "ChunkLayout", "Place", "pack"]

#: Alignment of tensors in a chunk. Matrix libraries select kernels by the alignment of operands, up to 256 bytes.
ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies.

    Attributes:
        chunk: number among the chunks of its kind.
        offset_bytes: in the chunk.
        num_bytes: of the tensor.
    """

    chunk: int
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Places of all parameters, and the numbers of the chunks of gradients and state.

    Attributes:
        chunk_bytes: size of every chunk.
        places: by parameter, in their order.
        num_of_kind: chunks of parameters, and of every other kind.
        states: names of the optimizer's state.
        beside: names of what else is kept of each parameter.
    """

    chunk_bytes: int
    places: tuple[Place, ...]
    num_of_kind: int
    states: tuple[str, ...]
    beside: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks of all kinds."""
        return self.num_of_kind * (2 + len(self.states) + len(self.beside))

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return self.num_chunks * self.chunk_bytes

    def parameters(self, chunk: int) -> int:
        """Number of the chunk of parameters that a chunk of any kind is of."""
        return chunk % self.num_of_kind

    def gradient(self, chunk: int) -> int:
        """Number of the chunk with the gradients of a chunk of parameters."""
        return self.num_of_kind + chunk

    def state(self, chunk: int, name: str) -> int:
        """Number of the chunk with a state of a chunk of parameters, or what else is kept of it."""
        return self.num_of_kind * (2 + (*self.states, *self.beside).index(name)) + chunk


def pack(
    names: Sequence[str],
    sizes: Sequence[int],
    *,
    chunk_bytes: int,
    states: Sequence[str] = (),
    beside: Sequence[str] = (),
    breaks: Collection[int] = (),
) -> ChunkLayout:
    """Pack tensors in their order: each into the last chunk, or a new one if it does not fit.

    Args:
        names: of the parameters.
        sizes: bytes of each.
        chunk_bytes: size of a chunk; rounded up to a multiple of `ALIGN_BYTES`. 0: that of the largest tensor.
        states: names of the optimizer's state.
        beside: names of what else is kept.
        breaks: numbers of parameters that begin a chunk.

    Raises:
        InputError: a parameter is larger than a chunk.
    """
    largest = max(sizes, default=0)
    if 0 < chunk_bytes < largest:
        name = names[list(sizes).index(largest)]
        raise InputError(f"dense.chunk_bytes must be at least {largest}, the bytes of {name}, got {chunk_bytes}")
    chunk_bytes = max(aligned(chunk_bytes or largest), ALIGN_BYTES)
    places: list[Place] = []
    chunk, used = 0, 0
    for number, size in enumerate(sizes):
        if used + size > chunk_bytes or (places and number in breaks):
            chunk, used = chunk + 1, 0
        places.append(Place(chunk=chunk, offset_bytes=used, num_bytes=size))
        used = aligned(used + size)
    return ChunkLayout(
        chunk_bytes=chunk_bytes,
        places=tuple(places),
        num_of_kind=chunk + 1 if places else 0,
        states=tuple(states),
        beside=tuple(beside),
    )


def aligned(num_bytes: int) -> int:
    """The next multiple of `ALIGN_BYTES`."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
