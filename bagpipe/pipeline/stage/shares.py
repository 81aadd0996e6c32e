"""Which examples a micro-batch holds, and which parts of the sender's micro-batches make up one of the receiver's.

    pipe k of K      examples [n k // K, n (k + 1) // K) of the replica's n
    micro-batch m    examples [c m // M, c (m + 1) // M) of its pipe's c

Rounded down alike everywhere, so examples shared by two micro-batches are always in the overlap of their exact shares:
what a schedule waits for is never too little. Micro-batches may differ by one example, or be empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bagpipe.oracle.assign import share_bounds
from bagpipe.schedule.ir.program import overlapping_units

__all__ = ["Piece", "bounds", "pieces", "uses"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[first, end)`` of the sender's micro-batch `unit`; `whole`: all it has."""

    unit: int
    first: int
    end: int
    whole: bool


def bounds(count: int, parts: int) -> tuple[int, ...]:
    """``[parts + 1]``: where each of the parts of `count` examples begins, and where the last one ends."""
    return share_bounds(count, (1,) * parts)


def pieces(sender: tuple[int, ...], receiver: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...]:
    """Per micro-batch of the receiver what it is made of, in order of examples; nothing for an empty one.

    Args:
        sender, receiver: bounds of their micro-batches, of the same examples.
    """
    made: list[tuple[Piece, ...]] = []
    for unit, (first, end) in enumerate(pairwise(receiver)):
        found = []
        for source in overlapping_units(unit, len(receiver) - 1, len(sender) - 1):
            start, stop = sender[source], sender[source + 1]
            a, b = max(first, start), min(end, stop)
            if a < b:
                found.append(Piece(source, a - start, b - start, (a, b) == (start, stop)))
        made.append(tuple(found))
    return tuple(made)


def uses(made: tuple[tuple[Piece, ...], ...], units: int) -> tuple[int, ...]:
    """``[units]``: how many of the receiver's micro-batches take a piece of each of the sender's."""
    counts = [0] * units
    for piece in (piece for unit in made for piece in unit):
        counts[piece.unit] += 1
    return tuple(counts)
