from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagpipe.errors import JobError
from bagpipe.report.charts import Chart, Choice
from bagpipe.report.page import Page, chart_html, render, section, write_page
from tests.report.html_reader import HtmlReader, check_self_contained

HOSTILE = "</script><script>window.hacked=1</script>"
CHART = Chart(
    name="chart",
    title=HOSTILE,
    note="note",
    choices=(Choice(name="which", label=HOSTILE, options=("one", HOSTILE), default=1),),
    figures={(0,): {"data": [], "layout": {}}, (1,): {"data": [{"name": HOSTILE}], "layout": {}}},
)


def page() -> str:
    body = section("Charts", [chart_html(CHART)])
    return render(Page(title=HOSTILE, header="<h1>x</h1>", lead="", body=body, footer="", charts=[CHART]))


def test_a_page_loads_nothing_and_holds_its_charts() -> None:
    found = HtmlReader(page())
    check_self_contained(found)
    figures = json.loads(found.texts["script", "figures"])
    assert figures["chart"]["figures"]["1"]["data"] == [{"name": HOSTILE}]
    assert figures["chart"]["choices"] == [{"name": "which", "options": ["one", HOSTILE], "default": 1}]


def test_hostile_text_stays_text() -> None:
    assert HOSTILE not in page()


def test_own_scripts_come_before_the_page_is_drawn() -> None:
    text = render(Page(title="t", header="", lead="", body="", footer="", charts=[], style="b {}\n", script="own();\n"))
    assert "b {}\n</style>" in text
    assert "own();\nstart();\n</script>" in text


def test_empty_sections_are_left_out() -> None:
    assert section("Nothing", ["", ""]) == ""
    assert section("Two", ["a", "", "b"]) == "<section>\n<h2>Two</h2>\na\nb\n</section>"


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot write"):
        write_page(tmp_path / "none" / "page.html", "text")
    write_page(tmp_path / "page.html", "caf\udce9")
    assert (tmp_path / "page.html").read_bytes() == b"caf\\udce9"
