from __future__ import annotations

from bagpipe.partition.bisect import Layout, least_bottleneck, probes
from bagpipe.partition.cost import Placed

VALUES = [7.0, 5.0, 3.0, 3.0 - 1e-9, 1.0]
LAYOUTS: list[Layout] = [(Placed(1, 1, number + 1),) for number in range(len(VALUES))]


def bottleneck(layout: Layout) -> float:
    return VALUES[LAYOUTS.index(layout)]


def first_that_keeps_to(target: float) -> Layout | None:
    return next((layout for layout in LAYOUTS if bottleneck(layout) <= target), None)


def test_the_least_is_found_among_near_ties():
    assert least_bottleneck(bottleneck, first_that_keeps_to) == LAYOUTS[-1]
    others = LAYOUTS[:-1]

    def solve(target: float) -> Layout | None:
        return next((layout for layout in others if bottleneck(layout) <= target), None)

    assert least_bottleneck(bottleneck, solve) == LAYOUTS[3]


def test_every_probe_is_better_than_the_one_before():
    values = [bottleneck(layout) for layout in probes(bottleneck, first_that_keeps_to)]
    assert values == sorted(set(values), reverse=True)


def test_no_candidates():
    assert least_bottleneck(bottleneck, lambda target: None) is None


def test_a_bottleneck_of_zero_ends_the_search():
    free: Layout = (Placed(1, 1, 1),)
    assert least_bottleneck(lambda layout: 0.0, lambda target: free) == free
