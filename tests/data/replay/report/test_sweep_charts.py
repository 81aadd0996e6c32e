"""Charts of the sweep: existing figures, data of each line, failures and the bound."""

from __future__ import annotations

import dataclasses

import plotly.graph_objects
import pytest

from data.replay.report.skew_chart import skew_chart
from data.replay.report.sweep_charts import BOUND, bounds_of, refetch_ratio, sweep_charts
from data.replay.report.trial_charts import trial_charts
from tests.data.replay.report.samples import ALL, FAILED, FULL, RANKS, SINGLE, failed, record


def charts_of(replay):
    return {chart.name: chart for chart in sweep_charts(replay)}


@pytest.mark.parametrize("name", ALL)
def test_every_figure_is_valid(name):
    """plotly's own schema accepts all keys and values."""
    replay = ALL[name]
    for chart in [*sweep_charts(replay), skew_chart(replay.skew), *trial_charts(replay.trials)]:
        assert chart.figures
        for key, figure in chart.figures.items():
            plotly.graph_objects.Figure(figure)
            assert len(key) == len(chart.choices)
            assert all(0 <= index < len(choice.options) for index, choice in zip(key, chart.choices, strict=True))
            assert all("title" in axis for axis in (figure["layout"]["xaxis"],))


def test_one_figure_per_choice_and_the_recommended_one_first():
    chart = charts_of(FULL)["hit-rate"]
    assert [choice.options for choice in chart.choices] == [("512", "1,024"), ("1",), ("1", "8", "32", "200")]
    assert [choice.default for choice in chart.choices] == [0, 0, 2]
    assert len(chart.figures) == 2 * 1 * 4
    assert len(charts_of(FULL)["traffic"].figures) == 2 * 1 * 4 * 3  # bytes, rows, time on a link


def test_lines_hold_the_records_figures():
    figure = charts_of(FULL)["hit-rate"].figures[0, 0, 2]
    line = next(trace for trace in figure["data"] if trace["name"] == "lru")
    expected = [record("lru", 32, rows, 512) for rows in (5_000, 10_000, 20_000, 40_000)]
    assert line["x"] == [item.cache_rows for item in expected]
    assert line["y"] == [item.hit_rate for item in expected]


def test_failed_settings_are_red_crosses_with_their_error():
    figure = charts_of(FULL)["hit-rate"].figures[1, 0, 2]
    crosses = figure["data"][-1]
    assert (crosses["name"], crosses["x"], crosses["marker"]["symbol"]) == ("failed", [5_000], "x")
    assert "drop-unused: batch 17 needs 7,312 unique rows" in crosses["customdata"][0][0]
    assert "lfu" not in crosses["customdata"][0][0]


def test_a_chart_of_failures_only():
    charts = charts_of(FAILED)
    assert set(charts) == {"hit-rate", "traffic"}
    assert [trace["name"] for trace in charts["hit-rate"].figures[0, 0, 0]["data"]] == ["failed"]


def test_the_ratio_to_the_bound():
    bound, lru = record(BOUND, 8, 10_000, 512), record("lru", 8, 10_000, 512)
    bounds = bounds_of([bound, lru])
    assert refetch_ratio(lru, bounds) == lru.rows_fetched / bound.rows_fetched
    assert refetch_ratio(bound, bounds) == 1
    assert refetch_ratio(record("lru", 8, 20_000, 512), bounds) is None
    assert refetch_ratio(failed("lru", 8, 10_000, 512, "no"), bounds) is None


def test_a_bound_that_fetches_nothing_has_no_ratio_but_for_its_equals():
    bound = dataclasses.replace(record(BOUND, 8, 10_000, 512), rows_fetched=0)
    lru = record("lru", 8, 10_000, 512)
    assert refetch_ratio(lru, bounds_of([bound])) is None
    assert refetch_ratio(dataclasses.replace(lru, rows_fetched=0), bounds_of([bound])) == 1


def test_charts_without_figures_are_left_out():
    assert set(charts_of(SINGLE)) == {"hit-rate", "traffic"}
    assert set(charts_of(RANKS)) == {"hit-rate", "traffic", "refetches", "exchange"}
    exchange = charts_of(RANKS)["exchange"].figures[0, 0, 0]
    assert [trace["name"] for trace in exchange["data"]] == ["belady-window", "drop-unused"]
