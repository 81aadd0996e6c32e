from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.forecast.forecast import Forecast
from bagpipe.forecast.sweep import Grid, Point, grid_points, pareto_front, sweep
from tests.cluster.clusters import cluster
from tests.forecast.jobs import DENSE, TRAFFIC

LARGER = replace(TRAFFIC, cache_rows=40_000, fetched=100.0, written=1_100.0)


def points_of(**changes: Any) -> list[Point]:
    grid = Grid(traffic=(TRAFFIC, LARGER), **changes)
    return sweep(list(grid_points(cluster(), grid, DENSE, dim=16)))


def test_every_combination_has_a_point() -> None:
    found = points_of(ranks=(1, 2), servers=(1, 4), bandwidths=(0.1, 1.0), direct=True)
    assert len(found) == 2 * 2 * 2 * 2 * 2
    assert {(each.ranks, each.servers, each.bandwidth, each.policy) for each in found} == {
        (ranks, servers, factor, policy)
        for ranks in (1, 2)
        for servers in (1, 4)
        for factor in (0.1, 1.0)
        for policy in ("belady-window", "direct")
    }
    assert {each.cache_rows for each in found if each.policy != "direct"} == {20_000, 40_000, 10_000}


@pytest.mark.parametrize(
    ("name", "values"), [("servers", (1, 2, 8)), ("cachers", (1, 2)), ("bandwidths", (0.01, 0.1, 1.0, 10.0))]
)
def test_more_of_anything_is_never_slower(name: str, values: tuple[Any, ...]) -> None:
    steps = [each.forecast.step_s for each in points_of(**{name: values})[::2] if each.forecast is not None]
    assert steps == sorted(steps, reverse=True)


def test_points_that_cannot_run_say_why() -> None:
    found = points_of(ranks=(1, 8))
    assert [bool(each.error) for each in found] == [False, True] * 2
    assert found[1].summary()["error"] == "expected a cluster with 8 devices, got 4 of 'small'"
    assert found[1].summary()["step_s"] is None
    assert found[0].summary()["limit"] == "B: dense part"


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    grid = Grid(traffic=(TRAFFIC,), bandwidths=tuple(0.5 + 0.001 * n for n in range(1_001)))
    found = sweep(list(grid_points(cluster(), grid, DENSE, dim=16)), on_points=lambda *numbers: told.append(numbers))
    assert told == [(500, 1001), (1000, 1001), (1001, 1001)]
    assert len(found) == 1001


def test_what_is_varied_must_be_there() -> None:
    with pytest.raises(InputError, match="stores: expected store servers"):
        list(grid_points(cluster(stores=None), Grid(traffic=(TRAFFIC,), servers=(2,)), DENSE, dim=16))
    with pytest.raises(InputError, match="cachers: expected cacher hosts"):
        list(grid_points(cluster(cachers=None), Grid(traffic=(TRAFFIC,), cachers=(2,)), DENSE, dim=16))


def point(time: float, memory: float, price: float) -> Point:
    found = Forecast(
        step_s=time,
        op_s={},
        shares={},
        limit="",
        busy={},
        device_bytes={"cache": memory},
        store_bytes=0.0,
        usd_per_million_examples=price,
        examples_per_s=1 / time,
    )
    return Point(
        batch_examples=1,
        lookahead=1,
        cache_rows=1,
        policy="x",
        ranks=1,
        servers=1,
        cachers=1,
        bandwidth=1.0,
        forecast=found,
    )


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3), max_size=20))
def test_the_front_is_what_no_point_beats(values: list[tuple[int, int, int]]) -> None:
    points = [point(*map(float, each)) for each in values]
    front = pareto_front(points)

    def beats(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    expected = {each for each in values if not any(beats(other, each) for other in values)}
    numbers = {id(each): number for number, each in enumerate(points)}
    found = [values[numbers[id(each)]] for each in front]
    assert set(found) == expected
    assert len(found) == len(expected), "of equal points one"
    assert [each[0] for each in found] == sorted(each[0] for each in found)
