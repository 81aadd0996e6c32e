"""`FlatLayout`: where the parameters of a unit lie in one flat, padded buffer, of which every rank owns an equal share.

    parameters   |  weight ........ |pad|  bias ... |pad|        each begins at a multiple of `ALIGNMENT` elements
    shares       |  rank 0     |  rank 1     |  rank 2     |     contiguous ranges of equal length
    segments of rank 1      weight[n:] |pad| bias[:m]            what its optimizer steps

Levels, as in ZeRO (arXiv:1910.02054): a rank keeps its share of the optimizer state, of the gradients too, or of the
parameters too. `kept_bytes` and `sent_bytes` are its formulas of memory and traffic. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagpipe.types.shard_level import SHARD_LEVELS, ShardLevel

__all__ = [
    "ALIGNMENT",
    "FlatLayout",
    "KeptBytes",
    "Piece",
    "Segment",
    "flat_layout",
    "kept_bytes",
    "sent_bytes",
]


#: Elements. Libraries choose kernels by the alignment of addresses, and another kernel rounds differently: parameters
#: begin where torch's own allocations could, at a multiple of 256 bytes (64 on a CPU).
ALIGNMENT = 64

#: Times that all elements of the parameters travel in a step. ZeRO: reduce-scatter of the gradients and all-gather of
#: the new parameters; or a gather before the forward and one before the backward.
_PASSES: Mapping[ShardLevel, int] = {"none": 2, "optimizer": 2, "gradients": 2, "parameters": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The elements of a parameter that lie in one rank's share; maybe none.

    Attributes:
        first: number of the first one in the flattened parameter.
        offset: its place in the share.
        length: number of elements.
    """

    first: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """One more than the number of the last element in the flattened parameter."""
        return self.first + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of elements of a tensor, as a checkpoint names it.

    Attributes:
        first: number of the first one in the flattened tensor.
        shape: of the whole tensor.
    """

    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatLayout:
    """The places of a unit's parameters.

    Attributes:
        sizes: elements of the parameters.
        starts: place of the first element of each.
        share: elements of a rank's share.
        num_ranks: ranks that have one.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    share: int
    num_ranks: int

    @property
    def length(self) -> int:
        """Elements of the whole buffer."""
        return self.share * self.num_ranks

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """What a rank's share has of each parameter, in order."""
        begin, end = rank * self.share, (rank + 1) * self.share
        found = []
        for start, size in zip(self.starts, self.sizes, strict=True):
            first, last = min(max(begin, start), start + size), max(min(end, start + size), start)
            length = max(last - first, 0)
            found.append(Segment(first=first - start, offset=first - begin if length else 0, length=length))
        return tuple(found)


def flat_layout(sizes: Sequence[int], num_ranks: int) -> FlatLayout:
    """The layout of parameters of these sizes, in this order.

    Raises:
        ValueError: there are less than two ranks.
    """
    if num_ranks < 2:
        raise ValueError(f"expected at least 2 ranks, got {num_ranks}")
    padded = [_rounded_up(size, ALIGNMENT) for size in sizes]
    starts = tuple(itertools.accumulate(padded, initial=0))[:-1]
    used = starts[-1] + sizes[-1] if sizes else 0
    share = -(-used // num_ranks)
    return FlatLayout(sizes=tuple(sizes), starts=starts, share=share, num_ranks=num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptBytes:
    """Bytes that a rank keeps between two steps, without padding.

    Attributes:
        parameters, gradients, state: of the dense part; gradients at the end of a backward.
    """

    parameters: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        """Of all three."""
        return self.parameters + self.gradients + self.state


def kept_bytes(level: ShardLevel, num_elements: int, num_ranks: int, *, itemsize: int, states: int) -> KeptBytes:
    """What a rank keeps of the dense part. In float32 with Adam 16 bytes per parameter, divided as the level says.

    Args:
        level: what is divided.
        num_elements: of all trainable parameters.
        num_ranks: among which it is divided.
        itemsize: bytes of an element.
        states: elements of optimizer state per parameter: 2 of Adam, 1 of Adagrad and of momentum, 0 of plain SGD.
    """
    whole, share = float(num_elements * itemsize), num_elements * itemsize / num_ranks
    depth = SHARD_LEVELS.index(level)
    return KeptBytes(
        parameters=share if depth >= 3 else whole,
        gradients=share if depth >= 2 else whole,
        state=states * (share if depth >= 1 else whole),
    )


def sent_bytes(level: ShardLevel, num_elements: int, num_ranks: int, *, itemsize: int) -> float:
    """Bytes that a rank sends in a step: 2 or 3 times its part of the others' shares, (n - 1) / n of all elements."""
    return _PASSES[level] * num_elements * itemsize * (num_ranks - 1) / num_ranks


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
