from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.forecast.pareto import pareto_front, recommend
from bagpipe.forecast.sweep import Point
from tests.forecast.points import made_point, swept

VALUES = st.lists(st.tuples(*[st.integers(1, 5)] * 3), max_size=30)


def front_by_pairs(values: list[tuple[int, int, int]]) -> list[int]:
    """Numbers of the points that no other one beats, of equal points the first, by comparing all pairs."""

    def beats(one: int, other: int) -> bool:
        if values[one] == values[other]:
            return one < other
        return all(a <= b for a, b in zip(values[one], values[other], strict=True))

    numbers = range(len(values))
    return [number for number in numbers if not any(beats(other, number) for other in numbers if other != number)]


@given(VALUES)
def test_the_front_is_what_no_point_beats(values: list[tuple[int, int, int]]) -> None:
    points = [made_point(*map(float, each)) for each in values]
    numbers = {id(each): number for number, each in enumerate(points)}
    found = [numbers[id(each)] for each in pareto_front(points)]
    assert sorted(found) == front_by_pairs(values)
    assert [values[number] for number in found] == sorted(values[number] for number in found), "by time"


def test_points_that_cannot_run_are_not_on_the_front() -> None:
    assert [each.settings["ranks"] for each in pareto_front(swept(ranks=(8, 1)))] == [1]
    assert pareto_front([]) == []


def test_a_long_front_is_found_whole() -> None:
    """Each point has less memory and a higher price than the one before: no point is beaten."""
    points = [made_point(1.0 + n % 7, 20_000.0 - n, 1.0 + n) for n in range(20_000)]
    assert len(pareto_front(points)) == 20_000


@given(VALUES.filter(bool))
def test_recommended_points_are_of_the_front(values: list[tuple[int, int, int]]) -> None:
    front = pareto_front([made_point(*map(float, each)) for each in values])
    best = recommend(front)
    assert all(any(each is point for point in front) for each in (best.fastest, best.cheapest, best.knee))

    def least(value: str, found: Point) -> bool:
        return getattr(found.forecast, value) == min(getattr(each.forecast, value) for each in front)

    assert least("step_s", best.fastest)
    assert least("usd_per_million_examples", best.cheapest)


@pytest.mark.parametrize("price", [1.0, 0.0])
def test_the_knee_is_good_in_everything(price: float) -> None:
    """With prices of 0 as well, where no logarithm exists."""
    points = [made_point(1.0, 5.0, 100.0), made_point(1.1, 5.0, 2.0), made_point(50.0, 5.0, price)]
    assert recommend(pareto_front(points)).knee is points[1]


def test_one_point_is_everything() -> None:
    [point] = front = pareto_front([made_point(1.0, 1.0, 0.0)])
    best = recommend(front)
    assert best.fastest is best.cheapest is best.knee is point
