"""Common parts of the charts: short numbers, axes, layout, escaped names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.report.charts import count_axis, finite, plain, short


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1_000, "1 k"), (999_900, "1 M"), (18_000, "18 k"), (33_800_000, "33.8 M")],
)
def test_short_numbers(value, text):
    assert short(value) == text


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12, unique=True).map(sorted))
def test_an_axis_shows_every_count(values):
    axis = count_axis("rows", values)
    if axis.get("type") == "log":
        assert values[0] > 0
    if "tickvals" in axis:
        assert axis["tickvals"] == values
    if "range" in axis:
        assert len(values) == 1


def test_crowded_ticks_are_left_to_the_library():
    assert "tickvals" in count_axis("rows", [1, 8, 32, 200])
    assert "tickvals" not in count_axis("rows", [100, 105, 800])
    assert "tickvals" not in count_axis("rows", list(range(1, 20)))


def test_names_are_drawn_letter_for_letter():
    assert plain("<b>a & b</b>") == "&lt;b&gt;a &amp; b&lt;/b&gt;"
    assert plain("x" * 41) == "x" * 39 + "…"


def test_non_finite_values_are_gaps():
    assert [finite(value) for value in (None, float("nan"), float("inf"), 0.5)] == [None, None, None, 0.5]
