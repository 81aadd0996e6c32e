from __future__ import annotations

import pytest

from bagpipe.errors import InputError
from bagpipe.forecast.axes import AXES
from bagpipe.forecast.pareto import pareto_front
from bagpipe.forecast.report import view as module
from bagpipe.forecast.report.view import best_gain, label, view_of
from bagpipe.forecast.what_if import Gain
from tests.cluster.clusters import cluster, hosts
from tests.forecast.points import swept
from tests.forecast.report.views import made, view


def test_the_front_and_its_gains() -> None:
    found = made("full")
    assert list(found.front) == pareto_front(found.points)
    assert len(found.gains) == len(found.front) == found.front_size
    assert [axis.name for axis in found.varied] == [
        *("batch_examples", "cache_rows", "policy", "ranks", "servers", "bandwidth"),
    ]
    assert label(found.best.fastest, found.varied[:1]) == "batch 4096"


def test_a_long_front_is_thinned_and_keeps_what_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made("full")
    monkeypatch.setattr(module, "_MOST", 2)
    found = view_of(whole.points, cluster="c", replay="r", model="m")
    assert found.front_size == whole.front_size > 4
    assert 2 <= len(found.front) <= 4, "the fastest is the first anyway"
    for point in (found.best.fastest, found.best.cheapest, found.best.knee):
        assert any(point is each for each in found.front)
    assert found.front[0] is whole.front[0]
    assert found.front[-1] is whole.front[-1]


def test_reasons_are_grouped_and_counted() -> None:
    found = made("full")
    failed = [point for point in found.points if point.error]
    assert sum(len(reason.points) for reason in found.reasons) == len(failed)
    texts = [reason.text for reason in found.reasons]
    assert texts[0] == "expected a cluster with 99 devices, got 16 of 'small'"
    assert texts[1] == "ranks: expected at most the 1024 examples of a batch, got 2048"
    assert len(texts) == 2, "numbers alone make no other reason"
    assert made("single").reasons == ()


def test_where_nothing_differs_one_axis_is_named() -> None:
    assert made("single").varied == AXES[:1]


def test_where_no_job_can_run() -> None:
    points = swept(ranks=(99,))
    with pytest.raises(InputError, match="no job of the grid can run: expected a cluster with 99 devices"):
        view_of(points, cluster="c", replay="r", model="m")


def test_the_best_purchase_must_be_worth_it() -> None:
    def gain(name: str, faster: float | None) -> Gain:
        return Gain(purchase=name, is_priced=True, faster=faster)

    assert best_gain([gain("a", 1.004), gain("b", None), gain("c", 0.5)]) is None
    found = best_gain([gain("a", 1.1), gain("b", 1.7), gain("c", 1.2)])
    assert found is not None
    assert found.purchase == "b"


def test_what_helps_most_is_the_limit_s_resource() -> None:
    slow = view(cluster(hosts(8)), bandwidth=(0.001,))
    for point, gains in zip(slow.front, slow.gains, strict=True):
        assert point.forecast is not None
        best = best_gain(gains)
        assert best is not None
        assert best.purchase in {"trainers' ports", "stores' ports", "store servers", "cacher hosts"}
        assert "port" in point.forecast.limit
