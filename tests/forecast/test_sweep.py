from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES
from bagpipe.forecast.forecast import forecast
from bagpipe.forecast.sweep import Outcome, chunks, sweep
from tests.cluster.clusters import cluster
from tests.effort import costly
from tests.forecast.jobs import TRAFFIC
from tests.forecast.points import swept, unswept

LARGER = replace(TRAFFIC, cache_rows=40_000, fetched=100.0, written=1_100.0)
TWO = (TRAFFIC, LARGER)
BOTH = ("", "direct")
FACTORS = tuple(0.5 + 0.001 * n for n in range(1_001))


def test_every_combination_has_a_point() -> None:
    found = swept(traffic=TWO, ranks=(1, 2), servers=(1, 4), bandwidth=(0.1, 1.0), policy=BOTH)
    assert len(found) == 3 * 2 * 2 * 2, "without a cache, the two settings are one"
    names = ("ranks", "servers", "bandwidth", "policy")
    assert {tuple(each.settings[name] for name in names) for each in found} == {
        (ranks, servers, factor, policy)
        for ranks in (1, 2)
        for servers in (1, 4)
        for factor in (0.1, 1.0)
        for policy in ("belady-window", "direct")
    }
    rows = {each.settings["cache_rows"] for each in found if each.settings["policy"] != "direct"}
    assert rows == {20_000, 40_000, 10_000}


def test_a_point_has_the_forecast_of_its_job() -> None:
    for point in swept(traffic=TWO, ranks=(1, 2), policy=BOTH):
        assert point.job is not None
        assert point.forecast == forecast(point.cluster, point.job)
        assert list(point.settings) == [axis.name for axis in AXES]
        assert list(point.summary())[: len(AXES)] == [axis.name for axis in AXES]


@pytest.mark.parametrize(
    ("name", "values"), [("servers", (1, 2, 8)), ("cachers", (1, 2)), ("bandwidth", (0.01, 0.1, 1.0, 10.0))]
)
def test_more_of_anything_is_never_slower(name: str, values: tuple[Any, ...]) -> None:
    steps = [each.forecast.step_s for each in swept(**{name: values}) if each.forecast is not None]
    assert len(steps) == len(values)
    assert steps == sorted(steps, reverse=True)


def test_points_that_cannot_run_say_why() -> None:
    found = swept(traffic=TWO, ranks=(1, 8, 2048))
    assert [bool(each.error) for each in found] == [False, True, True] * 2
    assert found[1].summary()["error"] == "expected a cluster with 8 devices, got 4 of 'small'"
    assert found[1].summary()["step_s"] is None
    assert found[0].summary()["limit"] == "B: dense part"
    more_than_examples = found[2].summary()
    assert more_than_examples["error"] == "ranks: expected at most the 1024 examples of a batch, got 2048"
    assert more_than_examples["ranks"] == 2048


def test_stages_schedules_and_shards_are_varied() -> None:
    """Of one stage, schedules and micro-batches are alike, so that there is one point."""
    found = swept(
        ranks=(4,), stages=(1, 2, 4), schedule=("gpipe", "1f1b"), microbatches=(4, 16), shard=("none", "optimizer")
    )
    names = ("stages", "schedule", "microbatches", "shard")
    settings = [tuple(each.settings[name] for name in names) for each in found]
    assert len(set(settings)) == len(settings) == (1 + 2 * 2 + 2 * 2) * 2
    assert (1, "none", 1, "none") in settings
    assert (4, "1f1b", 16, "optimizer") in settings
    assert not any(each.error for each in found)
    for each in found:
        stages = each.settings["stages"]
        assert each.job is not None
        assert (each.job.staged is None) == (stages == 1)
        assert each.job.staged is None or each.job.staged.replicas == 4 // int(stages)


def test_more_microbatches_shrink_the_bubble_to_nothing() -> None:
    """(S - 1) / M of the busy time, on links that take no time."""
    link = replace(cluster().links["net"], bytes_per_s=1e15, latency_s=0.0)
    fast = cluster(links={"local": link, "net": link})
    pipelines = swept(fast, ranks=(4,), stages=(4,), microbatches=(4, 32, 256))
    bubbles = [each.job.staged.bubble for each in pipelines if each.job is not None and each.job.staged is not None]
    assert bubbles == pytest.approx([3 / 4, 3 / 32, 3 / 256], rel=1e-6)


def test_shards_free_memory_and_cost_traffic_at_the_last_level() -> None:
    levels = ("none", "optimizer", "gradients", "parameters")
    found = [each.forecast for each in swept(ranks=(4,), shard=levels)]
    kept = [each.device_bytes["parameters"] for each in found if each is not None]
    assert kept == pytest.approx([12e6, 8e6 + 1e6, 4e6 + 2e6, 3e6])
    sent = [each.op_s["OPT"] for each in found if each is not None]
    assert sent[1] == sent[2] < sent[3]


def test_stages_that_cannot_be_are_points_with_an_error() -> None:
    found = swept(ranks=(4,), stages=(3, 4), microbatches=(8, 2000))
    assert [each.error for each in found] == [
        "stages: expected a divisor of the 4 ranks, got 3",
        "stages: expected a divisor of the 4 ranks, got 3",
        "",
        "microbatches: expected at most 1024, the examples of a replica, got 2000",
    ]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    found = sweep(unswept(bandwidth=FACTORS), on_points=lambda *numbers: told.append(numbers))
    assert told == [(500, 1001), (1000, 1001), (1001, 1001)]
    assert len(found) == 1001


def test_what_is_varied_must_be_there() -> None:
    with pytest.raises(InputError, match="stores: expected store servers"):
        unswept(cluster(stores=None), servers=(2,))
    with pytest.raises(InputError, match="cachers: expected cacher hosts"):
        unswept(cluster(cachers=None), cachers=(2,))


class InterruptError(Exception):
    """Ends a sweep."""


@costly(10)
@given(st.integers(1, 3))
def test_a_sweep_goes_on_where_it_was_interrupted(after: int) -> None:
    points = unswept(bandwidth=FACTORS, ranks=(1, 8))
    kept: dict[int, Outcome] = {}

    def keep(outcomes: Mapping[int, Outcome]) -> None:
        kept.update(outcomes)

    def interrupt(done: int, total: int) -> None:
        if done >= 500 * after:
            raise InterruptError

    with pytest.raises(InterruptError):
        sweep(points, on_outcomes=keep, on_points=interrupt)
    assert len(kept) == 500 * after
    told: list[tuple[int, int]] = []
    again: dict[int, Outcome] = {}
    found = sweep(points, known=dict(kept), on_outcomes=again.update, on_points=lambda *numbers: told.append(numbers))
    assert found == sweep(points)
    assert not kept.keys() & again.keys(), "what is known is not computed again"
    assert told[0][0] > 500 * after
    assert told[-1] == (2002, 2002)


def test_chunks_hold_one_kind_of_loop_each_where_they_can() -> None:
    points = unswept(bandwidth=FACTORS, policy=BOTH)
    parts = chunks(points, range(len(points)))
    assert sorted(number for part in parts for number in part) == list(range(2002))
    assert max(map(len, parts)) <= 500
    kinds = [{points[number].settings["policy"] for number in part} for part in parts]
    assert sum(len(each) > 1 for each in kinds) <= 1
