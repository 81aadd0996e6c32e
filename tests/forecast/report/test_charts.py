from __future__ import annotations

from typing import Any

import pytest

from bagpipe.forecast.report import charts as module
from bagpipe.forecast.report.charts import gains_chart, operations_chart, points_chart
from bagpipe.report.charts import Figure
from tests.forecast.report.views import HOSTILE, VIEWS, made


def traces(figure: Figure) -> list[dict[str, Any]]:
    data = figure["data"]
    assert isinstance(data, list)
    return data


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("against", [0, 1])
def test_every_point_that_can_run_is_drawn(name: str, against: int) -> None:
    view = made(name)
    drawn = traces(points_chart(view).figures[against,])
    possible = [point for point in view.points if point.forecast is not None]
    assert sum(len(trace["x"]) for trace in drawn) == len(possible)
    chosen = [place for trace in drawn for place in trace["customdata"] if place is not None]
    assert sorted(chosen) == list(range(len(view.front)))
    names = [trace["name"] for trace in drawn if trace["showlegend"]]
    assert len(names) == len(set(names)) == len({point.forecast.limit for point in possible if point.forecast})


def test_many_beaten_points_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OTHERS", 10)
    view = made("full")
    chart = points_chart(view)
    count = sum(len(trace["x"]) for trace in traces(chart.figures[0,]))
    assert len(view.front) < count <= len(view.front) + 10
    assert f"{count - len(view.front)} of the " in chart.note


def test_without_prices_memory_is_shown_first() -> None:
    assert points_chart(made("free")).choices[0].default == 1
    assert points_chart(made("full")).choices[0].default == 0


@pytest.mark.parametrize("name", VIEWS)
def test_a_point_is_its_operations(name: str) -> None:
    view = made(name)
    chart = operations_chart(view)
    assert len(chart.figures) == len(chart.choices[0].options) == len(view.front)
    assert view.front[chart.choices[0].default] is view.best.knee
    for place, point in enumerate(view.front):
        found = point.forecast
        assert found is not None
        drawn = {
            op: ms for trace in traces(chart.figures[place,]) for op, ms in zip(trace["y"], trace["x"], strict=True)
        }
        assert drawn == pytest.approx({op: 1e3 * seconds for op, seconds in found.op_s.items() if seconds})
        critical = traces(chart.figures[place,])[0]
        assert set(critical["y"]) == {op for op, share in found.shares.items() if share}


def test_gains_are_changes() -> None:
    view = made("full")
    chart = gains_chart(view)
    for place, gains in enumerate(view.gains):
        steps, prices = traces(chart.figures[place,])
        by_name = {f"2 x {gain.purchase}": gain for gain in gains}
        for name, step, price in zip(steps["y"], steps["x"], prices["x"], strict=True):
            gain = by_name[name]
            assert gain.faster
            assert gain.dearer
            assert step == pytest.approx(1 / gain.faster - 1, abs=1e-6)
            assert price == pytest.approx(gain.dearer - 1, abs=1e-6)


def test_without_prices_the_step_alone_changes() -> None:
    steps, prices = traces(gains_chart(made("free")).figures[0,])
    assert None not in steps["x"]
    assert set(prices["x"]) == {None}


def test_hostile_names_are_drawn_letter_for_letter() -> None:
    view = made("attack")
    texts = [text for trace in traces(points_chart(view).figures[0,]) for text in trace["text"]]
    assert any("&lt;/script&gt;" in text for text in texts)
    assert not any("<img" in text or HOSTILE[:9] in text for text in texts)
