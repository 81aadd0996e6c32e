"""Coverage curves: one line per table, coloured by size."""

from __future__ import annotations

from data.replay.report.skew_chart import skew_chart
from tests.data.replay.report.samples import skew


def test_large_tables_come_first_and_are_yellow():
    tables = (skew("small", 1, 0.2), skew("large", 10**9, 0.9), skew("middle", 1_000, 0.5))
    figure = skew_chart(tables).figures[()]
    assert [trace["name"] for trace in figure["data"]] == ["large", "middle", "small"]
    assert [figure["data"][place]["line"]["color"] for place in (0, 2)] == ["#d9b43c", "#2f4f9e"]
    assert figure["data"][1]["x"] == [x for x, _ in tables[2].curve]


def test_a_table_that_was_never_used_does_no_harm():
    assert skew_chart((skew("empty", 0, 1.0),)).figures[()]["data"]
