"""The points of a sweep that no other one beats, and which of them to take.

    Points ──pareto_front──> front, by time ──recommend──> the fastest, the cheapest, and one that is nearly both

Three values count: time of an example, memory of a device, price of an example.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.sweep import Point

__all__ = ["Recommendation", "pareto_front", "recommend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Points of a front.

    Attributes:
        fastest, cheapest: with the least time and the least price of an example.
        knee: the nearest to the best value of each kind.
    """

    fastest: Point
    cheapest: Point
    knee: Point


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats or equals in time of an example, device memory and price together.

    Of equal points, the first. In the order of the time. Points that cannot run are left out. With n points it takes
    about n log n steps: by ascending time a point is beaten exactly if an earlier one has at most its memory and its
    price, and the least price by memory is a staircase.
    """
    possible = [point for point in points if point.forecast is not None]
    values = _values(possible)
    kept: list[int] = []
    memories: list[float] = []  # of the staircase, ascending
    prices: list[float] = []  # the least price with at most that memory, descending
    for place in np.lexsort(values.T[::-1]).tolist():  # by time, then memory, then price
        _, memory, price = values[place].tolist()
        before = bisect_right(memories, memory)
        if before and prices[before - 1] <= price:
            continue
        kept.append(place)
        first = bisect_left(memories, memory)
        last = first
        while last < len(prices) and prices[last] >= price:  # each step leaves for good
            last += 1
        memories[first:last], prices[first:last] = [memory], [price]
    return [possible[place] for place in kept]


def recommend(front: Sequence[Point]) -> Recommendation:
    """Which points of a front to look at first.

    The knee has the least distance to the best values, each measured on the front's own scale: logarithms, from 0 at
    the best to 1 at the worst.

    Args:
        front: at least one point.
    """
    values = _values(front)
    scaled = np.zeros(values.shape)
    for column, own in zip(scaled.T, values.T, strict=True):
        measured = np.log(own) if (own > 0).all() else own  # a cluster without prices costs nothing
        spread = measured.max() - measured.min()
        if spread > 0:
            column[:] = (measured - measured.min()) / spread
    return Recommendation(
        fastest=front[int(values[:, 0].argmin())],
        cheapest=front[int(values[:, 2].argmin())],
        knee=front[int((scaled**2).sum(axis=1).argmin())],
    )


def _values(points: Sequence[Point]) -> NDArray[np.float64]:
    """float64 [points, 3]: seconds of an example, bytes of a device, price of a million examples."""
    return np.array([_three(point.forecast) for point in points if point.forecast is not None]).reshape(-1, 3)


def _three(found: Forecast) -> tuple[float, float, float]:
    return (1 / found.examples_per_s, sum(found.device_bytes.values()), found.usd_per_million_examples)
