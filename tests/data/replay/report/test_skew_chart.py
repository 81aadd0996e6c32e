"""Coverage curves: one line per table; the largest have looks of their own, the others are one group."""

from __future__ import annotations

from data.replay.report.skew_chart import skew_chart
from tests.data.replay.report.samples import skew


def test_large_tables_come_first():
    tables = (skew("small", 1, 0.2), skew("large", 10**9, 0.9), skew("middle", 1_000, 0.5))
    figure = skew_chart(tables).figures[()]
    assert [trace["name"] for trace in figure["data"]] == ["large", "middle", "small"]
    assert figure["data"][1]["x"] == [x for x, _ in tables[2].curve]


def test_criteos_tables_can_be_told_apart():
    """26 curves: eight looks, no two alike, and one group of 18 whose members keep their names."""
    figure = skew_chart(tuple(skew(f"C{number}", 1000 + number, 0.5) for number in range(1, 27))).figures[()]
    named, others = figure["data"][:8], figure["data"][8:]
    assert [trace["name"] for trace in named] == [f"C{number}" for number in range(26, 18, -1)]
    looks = {(trace["line"]["color"], trace["line"]["dash"]) for trace in named}
    assert len(looks) == len(named)
    assert {trace["name"] for trace in others} == {"18 smaller tables"}
    assert [trace["showlegend"] for trace in others] == [True] + [False] * 17
    assert {trace["meta"] for trace in figure["data"]} == {f"C{number}" for number in range(1, 27)}
    assert all("%{fullData.meta}" in trace["hovertemplate"] for trace in figure["data"])


def test_one_more_table_than_looks_is_no_group():
    figure = skew_chart(tuple(skew(f"C{number}", number, 0.5) for number in range(9))).figures[()]
    assert all("legendgroup" not in trace for trace in figure["data"])


def test_a_table_that_was_never_used_does_no_harm():
    assert skew_chart((skew("empty", 0, 1.0),)).figures[()]["data"]
