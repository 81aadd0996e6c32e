"""The projection of a planner in shards names what saturates first."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.scale.points import Point
from benchmarks.scale_out.main import POINTS
from benchmarks.scale_out.projection import project, shard_table
from benchmarks.scale_out.shards import ShardCost, measure_shards

POINT = Point(batch_size=1_000)
COST = ShardCost(
    whole_ms=40,
    shard_ms=20,
    shards_ms=40,
    join_ms=5,
    planner_ms=10,
    records_ms=5,
    shard_mb=2,
    plan_mb=4,
    shard_state_mb=1,
)


@pytest.mark.parametrize(
    ("changes", "limit", "examples_per_s", "speed_up"),
    [
        ({}, "shards", 50_000, 2),
        ({"shard_ms": 5}, "planner", 100_000, 4),
        ({"shard_ms": 5, "join_ms": 20}, "joining", 50_000, 2),
        ({"shard_ms": 5, "records_ms": 20}, "records", 50_000, 2),
        ({"plan_mb": 500}, "port", 25_000, 2),
    ],
)
def test_the_slowest_bounds_the_job(
    changes: dict[str, float], limit: str, examples_per_s: float, speed_up: float
) -> None:
    found = project(POINT, dataclasses.replace(COST, **changes))
    assert (found.limit, found.examples_per_s, found.speed_up) == (limit, pytest.approx(examples_per_s), speed_up)


def test_shards_are_measured_and_shown() -> None:
    point, _ = POINTS[0]
    point = dataclasses.replace(point, batch_size=64, lookahead=3, cache_rows=4_000)
    cost = measure_shards(point, 4, 2)
    assert 0 < cost.shard_ms <= cost.shards_ms
    row = shard_table([{"point": dataclasses.asdict(point), "shards": 4, "cost": dataclasses.asdict(cost)}])
    assert row.splitlines()[2].startswith("| 26 | 8 | 4 |")
