"""The report of a sweep in a real headless browser: it draws, follows the reader, logs no error and loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bagpipe.forecast.report import write_report
from tests.forecast.report.views import VIEWS, made
from tests.report.browser import DESK, PHONE, Browser, any_browser, show

DRAWN = "[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.parentNode.id)"
CHOICES = "[...document.querySelectorAll('select[data-choice=point]')].map(list => list.value)"
STEP = "document.querySelector('#operations .plot').layout.xaxis.title.text"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with any_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for name in VIEWS:
        write_report(folder / f"{name}.html", made(name))
    return folder


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [
        ("full", DESK, False),
        ("full", PHONE, True),
        ("single", PHONE, False),
        ("free", DESK, True),
        ("attack", PHONE, True),
    ],
)
def test_reports_draw_without_errors(browser: Browser, reports: Path, name: str, width: int, dark: bool) -> None:
    show(browser, reports / f"{name}.html", width=width, dark=dark)
    assert browser.evaluate(DRAWN) == ["points", "operations", "gains"]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hacked") is None
    assert browser.requests == [browser.address]
    assert browser.problems == []


def test_the_page_follows_the_scheme(browser: Browser, reports: Path) -> None:
    colors = []
    for dark in (False, True):
        show(browser, reports / "full.html", dark=dark)
        colors.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 27)"]


def test_a_click_on_a_point_chooses_it(browser: Browser, reports: Path) -> None:
    view = made("full")
    show(browser, reports / "full.html")
    knee = next(place for place, point in enumerate(view.front) if point is view.best.knee)
    assert browser.evaluate(CHOICES) == [str(knee)] * 2
    plot = "document.querySelector('#points .plot')"
    browser.evaluate(f"{plot}.scrollIntoView({{block: 'center'}})")
    last = len(view.front) - 1
    place = (
        f"(plot => {{ const box = plot.querySelector('.nsewdrag').getBoundingClientRect(), l = plot._fullLayout; "
        f"for (const t of plot.data) {{ const i = t.customdata.indexOf({last}); if (i >= 0) "
        f"return [box.x + l.xaxis.d2p(t.x[i]), box.y + l.yaxis.d2p(t.y[i])]; }} }})({plot})"
    )
    x, y = browser.evaluate(place)
    clicked = f"void (window.clicked = new Promise(done => {plot}.on('plotly_click', () => done(true))))"
    browser.evaluate(clicked)
    for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
        button = "none" if kind == "mouseMoved" else "left"
        browser.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)
    assert browser.evaluate("window.clicked")
    assert browser.evaluate(CHOICES) == [str(last)] * 2
    found = view.front[last].forecast
    assert found is not None
    assert f"step {found.step_s * 1e3:.4g} ms" in browser.evaluate(STEP)
    assert browser.problems == []


def test_lists_move_both_charts(browser: Browser, reports: Path) -> None:
    show(browser, reports / "full.html")
    browser.evaluate(
        "(s => { s.value = '0'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#gains select[data-choice=point]'))"
    )
    assert browser.evaluate(CHOICES) == ["0", "0"]
    found = made("full").front[0].forecast
    assert found is not None
    assert f"step {found.step_s * 1e3:.4g} ms" in browser.evaluate(STEP)


def test_memory_instead_of_price(browser: Browser, reports: Path) -> None:
    show(browser, reports / "full.html")
    title = "document.querySelector('#points .plot').layout.yaxis.title.text"
    assert browser.evaluate(title) == "$ of a million examples"
    browser.evaluate(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#points select[data-choice=against]'))"
    )
    assert browser.evaluate(title) == "GB on a device"


def test_the_front_sorts_by_every_column(browser: Browser, reports: Path) -> None:
    show(browser, reports / "full.html")
    count = browser.evaluate("document.querySelectorAll('#front th').length")
    for column in range(count):
        cells = f"[...document.querySelectorAll('#front tbody tr')].map(row => row.cells[{column}].dataset.v)"
        for falling in (False, True):
            browser.click(f"#front th:nth-child({column + 1}) button")
            values = browser.evaluate(cells)
            if all(value.replace(".", "", 1).isdigit() for value in values):
                numbers = [float(value) for value in values]
                assert numbers == sorted(numbers, reverse=falling)
    assert browser.problems == []
