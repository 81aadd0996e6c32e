"""`greatest_ratio`: the cycle of a graph with the greatest ratio of cost to turns, for many sets of costs at once.

    edges (src, dst, turns), costs of P points ──> ratio of the best cycle known ──> weights: cost - ratio * turns
                                                     ^                                   │ Bellman-Ford, all points
                                                     └── ratio of a cycle of positive weight; none: done

A ratio that a cycle has is a lower bound. With it in the weights, a cycle has a positive weight exactly if its own
ratio is greater. So each round replaces the cycle by a better one, and the last one is the best (the test is Lawler's,
Combinatorial Optimization, 1976; the steps are Newton's: Dinkelbach, On nonlinear fractional programming, 1967). The
work does not depend on the turns: an edge that reaches back 5,000 turns costs as much as one of 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["CriticalCycle", "GraphEdge", "greatest_ratio"]

#: A cycle is better if its weight is above this share of all costs for each of its edges: more than sums round by.
_ROUNDING = 1e-13

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GraphEdge:
    """Node `dst` waits for `src`.

    Attributes:
        src, dst: numbers of nodes.
        turns: how many turns before.
        delay: float64 [P] or [1]: seconds in between; None: 0.
    """

    src: int
    dst: int
    turns: int
    delay: _Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalCycle:
    """Result for P points.

    Attributes:
        ratio: float64 [P]: cost of the cycle, delays included, per turn. 0 where no cycle costs anything.
        turns: int64 [P]: of the cycle; 0 where there is none.
        nodes: bool [nodes, P]: the nodes of the cycle, each of which it passes once.
    """

    ratio: _Floats
    turns: NDArray[np.int64]
    nodes: NDArray[np.bool_]


def greatest_ratio(edges: Sequence[GraphEdge], costs: _Floats) -> CriticalCycle:
    """The cycle with the greatest ratio of each point.

    Args:
        edges: of a graph whose cycles all have at least one turn. In the order of the paths without turns it is found
            fastest.
        costs: float64 [nodes, P], at least 0: the time of each node.
    """
    size, points = costs.shape
    found = CriticalCycle(
        ratio=np.zeros(points), turns=np.zeros(points, np.int64), nodes=np.zeros((size, points), np.bool_)
    )
    base = np.stack([costs[edge.dst] if edge.delay is None else costs[edge.dst] + edge.delay for edge in edges])
    slack = base.sum(axis=0) * _ROUNDING
    graph = _Graph(edges, size)
    left = np.arange(points)
    while left.size:
        own = np.ascontiguousarray(base[:, left])
        weights = own - found.ratio[left] * graph.turns[:, None] - slack[left]
        came_by, last = graph.longest_paths(weights)
        own_left = np.flatnonzero(last >= 0)
        cost, turns, nodes = graph.cycles(came_by[:, own_left], last[own_left], own[:, own_left])
        ratio = np.divide(cost, turns, out=np.zeros(len(turns)), where=turns > 0)
        better = ratio > found.ratio[left[own_left]]
        left = left[own_left[better]]
        found.ratio[left], found.turns[left] = ratio[better], turns[better]
        found.nodes[:, left] = nodes[:, better]
    return found


class _Graph:
    """The edges as arrays, and the two walks over them."""

    def __init__(self, edges: Sequence[GraphEdge], size: int) -> None:
        self.size = size
        self.ends = [(edge.src, edge.dst) for edge in edges]
        self.turns = np.array([edge.turns for edge in edges], np.int64)
        self.sources = np.array([edge.src for edge in edges], np.int64)

    def longest_paths(self, weights: _Floats) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Edges by which the longest paths come, and the node whose path still grew in the last pass.

        Args:
            weights: float64 [edges, P].

        Returns:
            int64 [nodes, P], -1 where the path begins; int64 [P], -1 where there is no cycle of positive weight.
        """
        points = weights.shape[1]
        longest = np.zeros((self.size, points))
        came_by = np.full((self.size, points), -1, np.int64)
        last = np.full(points, -1, np.int64)
        reached, better = np.empty(points), np.empty(points, np.bool_)
        for _ in range(self.size + 1):  # a path of more edges than nodes has a cycle
            last.fill(-1)
            for number, (src, dst) in enumerate(self.ends):
                np.add(longest[src], weights[number], out=reached)
                np.greater(reached, longest[dst], out=better)
                if better.any():
                    np.copyto(longest[dst], reached, where=better)
                    np.copyto(came_by[dst], number, where=better)
                    np.copyto(last, dst, where=better)
            if (last < 0).all():
                break
        return came_by, last

    def cycles(
        self, came_by: NDArray[np.int64], at: NDArray[np.int64], base: _Floats
    ) -> tuple[_Floats, NDArray[np.int64], NDArray[np.bool_]]:
        """Cost float64 [P], turns int64 [P] and nodes bool [nodes, P] of the cycles behind nodes `at`, int64 [P].

        Where the way back ends before a cycle (by rounding), turns are 0.
        """
        points = np.arange(at.size)
        for _ in range(self.size):  # so many steps back are sure to reach the cycle
            edge = came_by[at, points]
            at = np.where(edge < 0, at, self.sources[edge])
        cost, turns = np.zeros(at.size), np.zeros(at.size, np.int64)
        nodes = np.zeros((self.size, at.size), np.bool_)
        first, going = at, came_by[at, points] >= 0
        for _ in range(self.size):
            edge = came_by[at, points]
            nodes[at[going], points[going]] = True
            cost += np.where(going, base[edge, points], 0.0)
            turns += np.where(going, self.turns[edge], 0)
            at = np.where(going, self.sources[edge], at)
            going = going & (at != first)
        return cost, turns, nodes
