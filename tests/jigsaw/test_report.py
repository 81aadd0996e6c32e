"""The report as a file and in a browser: complete, reproducible, safe against network access and hostile text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.report import render_page, write_report
from bagpipe.jigsaw.simulate import run_jobs
from bagpipe.jigsaw.timeline import Timeline
from tests.jigsaw.made_jobs import job
from tests.report.browser import DESK, PHONE, Browser, any_browser, show
from tests.report.html_reader import HtmlReader, check_self_contained

HOSTILE = "<img src=x onerror=hacked=1>"


@pytest.fixture(scope="module")
def timelines() -> list[Timeline]:
    jobs = [job(HOSTILE, shares=(1.0, 0.5), iterations=500), job("b", deadline_s=9.0, shares=(0.5, 1.0))]
    return [run_jobs(jobs, 2, policy) for policy in POLICIES.values()]


def test_the_page_is_complete_and_loads_nothing(timelines: list[Timeline]) -> None:
    text = render_page(timelines, source=HOSTILE)
    check_self_contained(HtmlReader(text))
    assert HOSTILE not in text
    assert "<h1>Jobs of <code>&lt;img" in text
    assert "2 jobs on 2 ranks, simulated." in text


def test_equal_input_gives_equal_bytes(timelines: list[Timeline], tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, timelines, source="jobs.toml")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_each_policy_and_job_has_a_row(timelines: list[Timeline]) -> None:
    text = render_page(timelines, source="s")
    rows = [part.count("<tr>") - 1 for part in text.split("<table")[1:]]
    assert rows == [len(timelines), 2 * len(timelines)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with any_browser() as browser:
        yield browser


@pytest.mark.parametrize(("width", "dark"), [(DESK, False), (PHONE, True)])
def test_it_draws_without_errors(
    browser: Browser, timelines: list[Timeline], tmp_path: Path, width: int, dark: bool
) -> None:
    write_report(tmp_path / "report.html", timelines, source=HOSTILE)
    show(browser, tmp_path / "report.html", width=width, dark=dark)
    drawn = "[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.parentNode.id)"
    assert browser.evaluate(drawn) == ["efficiency", "timeline"]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hacked") is None
    assert browser.evaluate("document.querySelectorAll('select[data-choice=run] option').length") == len(timelines)
    assert browser.requests == [browser.address]
    assert browser.problems == []
