"""The page as a file: complete, reproducible, safe against network access and hostile text. Needs no browser."""

from __future__ import annotations

import dataclasses

import pytest
from plotly.offline import get_plotlyjs

from data.replay.report import write_report
from data.replay.report.page import render_page
from tests.data.replay.report.samples import ALL, FULL, HOSTILE
from tests.report.html_reader import HtmlReader, check_self_contained


@pytest.mark.parametrize("name", ALL)
def test_the_page_is_complete_and_loads_nothing(name):
    check_self_contained(HtmlReader(render_page(ALL[name])))


def test_data_without_a_file_are_named_by_their_format():
    assert "<title>Replay of synthetic data</title>" in render_page(
        dataclasses.replace(FULL, path="", format="synthetic")
    )


def test_the_page_forbids_loading():
    assert "default-src 'none'" in render_page(FULL)


def test_the_chart_library_is_inside():
    assert HtmlReader(render_page(FULL)).texts["script", "library"] == get_plotlyjs()


def test_equal_input_gives_equal_bytes(tmp_path):
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, FULL)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_the_recommendation_is_on_top():
    text = render_page(FULL)
    heading = "Recommended: belady-window, lookahead 32, cache of 20,000 rows, batch size 512"
    assert text.index(heading) < text.index(FULL.reason) < text.index("<figure")
    assert "--oracle.policy belady-window --oracle.lookahead 32 --cache.rows 20000 --data.batch_size 512" in text
    assert "No recommendation" in render_page(ALL["failed"])


def test_hostile_text_stays_text(tmp_path):
    path = tmp_path / "attack.html"
    write_report(path, ALL["attack"])
    text = path.read_text(encoding="utf-8")
    assert HOSTILE[:20] not in text
    assert "<img" not in text
    shown = HOSTILE.replace("\udcff", "\\udcff")
    assert HtmlReader(text).texts["code", None].startswith(shown)  # the path in the heading


def test_without_a_policy_there_is_nothing_to_recommend():
    text = render_page(dataclasses.replace(ALL["savings"], records=()))
    assert "No recommendation" not in text
    assert "All settings" not in text
    assert text.index("<h2>Thresholds and limits for rows</h2>") < text.index('id="limits"')
    assert "Thresholds" not in render_page(FULL)
