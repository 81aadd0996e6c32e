"""`SPTree`: an operator graph as nested series and parallel parts.

    leaf: one operator     series: all of a part comes before all of the next     parallel: parts without a path between

Edges define a partial order, so edges that a longer path implies do not matter. A part that is neither series nor
parallel (the smallest is a -> c, a -> d, b -> d) is cut by a *barrier* into its first levels and the rest, as if every
operator of the first fed every operator of the second. A search on the tree misses partitions with stages across a
barrier; results do not change. The barrier is at the level where it adds the fewest pairs to the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bagpipe.partition.operators import OperatorGraph, members, union

__all__ = ["SPTree", "decompose", "parallel", "series"]


@dataclass(frozen=True, slots=True)
class SPTree:
    """A part of the graph.

    Attributes:
        kind: leaf, series (parts in order) or parallel; nested parts of the same kind are merged.
        mask: its operators.
        parts: empty in a leaf, else at least two.
        barriers: number of barriers.
    """

    kind: Literal["leaf", "series", "parallel"]
    mask: int
    parts: tuple[SPTree, ...] = ()
    barriers: int = 0


def decompose(graph: OperatorGraph) -> SPTree:
    """The tree of the whole graph; ``barriers`` is 0 if and only if the graph is series-parallel."""
    return _Decomposer(graph).tree(graph.everything)


def series(*parts: SPTree, barriers: int = 0) -> SPTree:
    """Parts in sequence; a single part is returned as it is."""
    return _joined("series", parts, barriers)


def parallel(*parts: SPTree) -> SPTree:
    """Parts side by side; a single part is returned as it is."""
    return _joined("parallel", parts, 0)


def _joined(kind: Literal["series", "parallel"], parts: tuple[SPTree, ...], barriers: int) -> SPTree:
    flat = tuple(inner for part in parts for inner in (part.parts if part.kind == kind else (part,)))
    if len(flat) == 1:
        return flat[0]
    return SPTree(kind, union(p.mask for p in flat), flat, barriers + sum(p.barriers for p in parts))


class _Decomposer:
    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.neighbours = [p | c for p, c in zip(graph.producers, graph.consumers, strict=True)]

    def tree(self, mask: int) -> SPTree:
        if mask & (mask - 1) == 0:
            return SPTree("leaf", mask)
        parts = self.components(mask)
        if len(parts) > 1:
            return parallel(*map(self.tree, parts))
        parts = self.cuts(mask)
        if len(parts) > 1:
            return series(*map(self.tree, parts))
        first = self.barrier(mask)
        return series(self.tree(first), self.tree(mask & ~first), barriers=1)

    def components(self, mask: int) -> list[int]:
        """Parts without a path between them, by first operator. The mask is convex, so paths do not leave it."""
        parts = []
        while mask:
            part, new = 0, mask & -mask
            while new:
                part |= new
                new = union(self.neighbours[n] for n in members(new)) & mask & ~part
            parts.append(part)
            mask &= ~part
        return parts

    def cuts(self, mask: int) -> list[int]:
        """Parts that wholly precede the next part. In a topological order each is a run."""
        parts, part, done = [], 0, 0
        followers = mask
        for operator in self.graph.order:
            if mask >> operator & 1:
                part |= 1 << operator
                done |= 1 << operator
                followers &= self.graph.descendants[operator]
                if followers == mask & ~done:
                    parts.append(part)
                    part, followers = 0, mask & ~done
        return parts

    def barrier(self, mask: int) -> int:
        """The first side of a barrier: the operators below some level, from the start or from the end."""
        graph = self.graph
        from_start, to_end = [0] * graph.size, [0] * graph.size
        for order, feeds, level in (
            (graph.order, graph.producers, from_start),
            (graph.order[::-1], graph.consumers, to_end),
        ):
            for operator in (n for n in order if mask >> n & 1):
                level[operator] = max((level[n] + 1 for n in members(feeds[operator] & mask)), default=0)
        own, height = members(mask), max(from_start)
        sides = [union(1 << n for n in own if from_start[n] < cut) for cut in range(1, height + 1)]
        sides += [union(1 << n for n in own if height - to_end[n] < cut) for cut in range(1, height + 1)]
        return min(sides, key=lambda side: (self.added(side, mask & ~side), abs(2 * side.bit_count() - len(own))))

    def added(self, first: int, second: int) -> int:
        """Pairs that a barrier adds to the order."""
        return sum((second & ~self.graph.descendants[n]).bit_count() for n in members(first))
