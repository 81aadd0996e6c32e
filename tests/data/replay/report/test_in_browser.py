"""The report in a real headless browser: it draws, reacts, logs no error and loads nothing."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from data.replay.report import write_report
from tests.data.replay.report.samples import ALL, FULL
from tests.report.browser import DESK, PHONE, Browser, any_browser, show

TRACES = (
    "Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map(p => [p.parentNode.id, p.data.length]))"
)
FIRST_CELLS = "[...document.querySelectorAll('#tables tbody tr')].map(row => row.cells[{column}].dataset.v)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with any_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    for name, replay in ALL.items():
        write_report(folder / f"{name}.html", replay)
    return folder


@pytest.mark.parametrize(
    ("name", "width", "dark", "traces"),
    [
        ("full", DESK, False, {"hit-rate": 6, "traffic": 6, "refetches": 6, "skew": 17, "trials": 3, "gantt": 7}),
        ("failed", PHONE, True, {"hit-rate": 1, "traffic": 1}),
        ("ranks", PHONE, True, {"hit-rate": 6, "traffic": 6, "refetches": 6, "exchange": 2}),
        ("attack", PHONE, False, {"hit-rate": 2, "traffic": 1, "skew": 1, "trials": 3, "gantt": 1}),
    ],
)
def test_reports_draw_without_errors(browser, reports, name, width, dark, traces):
    file = reports / f"{name}.html"
    show(browser, file, width=width, dark=dark)
    assert browser.evaluate(TRACES) == traces
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate("window.hacked") is None
    assert browser.requests == [browser.address]
    assert browser.problems == []


def test_the_page_has_no_network_access(browser, reports):
    show(browser, reports / "single.html")
    assert browser.evaluate(TRACES) == {"hit-rate": 1, "traffic": 1}
    assert browser.problems == []
    asked = "fetch('http://127.0.0.1:9/').then(() => 'reached', () => 'refused')"
    assert browser.evaluate(asked) == "refused"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_points_have_tooltips_and_the_legend_hides_lines(browser, reports):
    show(browser, reports / "ranks.html")
    browser.evaluate("Plotly.Fx.hover(document.querySelector('#hit-rate .plot'), [{curveNumber: 2, pointNumber: 1}])")
    text = browser.evaluate("document.querySelector('#hit-rate .hovertext').textContent")
    assert text.startswith("lru · hit rate 48.57%")
    assert "cache 10,000 rows (5.54% of all rows)" in text
    assert "MB" in text
    hidden = (
        "new Promise(done => { const plot = document.querySelector('#hit-rate .plot'); plot.on('plotly_restyle', "
        "() => done(plot.data.filter(t => t.visible === 'legendonly').map(t => t.name).join())); })"
    )
    browser.evaluate(f"void (window.hidden = {hidden})")
    browser.click("#hit-rate .legendtoggle")
    assert browser.evaluate("window.hidden") == "belady-window"


def test_medians_fit_beside_their_bars_on_a_phone(browser, reports):
    show(browser, reports / "full.html", width=PHONE)
    right = "document.querySelector('#trials {}').getBoundingClientRect().right"
    texts = browser.evaluate(
        "[...document.querySelectorAll('#trials .bartext')].map(text => [text.textContent.trim(), "
        f"text.getBoundingClientRect().right <= {right.format('.main-svg')}])"
    )
    assert [text.split()[-2:] for text, _ in texts] == [["41.2", "ms"], ["10.1", "ms"], ["9.3", "ms"]]
    assert all(fits for _, fits in texts)


def test_choices_move_all_charts_that_share_them(browser, reports):
    show(browser, reports / "full.html")
    before = browser.evaluate("document.querySelector('#hit-rate .plot').data[0].y")
    browser.evaluate(
        "(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#traffic select[data-choice=batch_size]'))"
    )
    assert browser.evaluate("document.querySelector('#hit-rate select[data-choice=batch_size]').value") == "1"
    after = browser.evaluate("document.querySelector('#hit-rate .plot').data[0].y")
    assert (len(before), len(after)) == (4, 3)  # the smallest cache is too small for the larger batch
    assert browser.evaluate("document.querySelector('#hit-rate .plot').data.at(-1).name") == "failed"
    assert browser.problems == []


def test_tables_sort_both_ways_with_empty_cells_last(browser, reports):
    show(browser, reports / "full.html")
    rows = [table.rows for table in FULL.skew]
    head = "#tables th:nth-child(2) button"
    for expected, order in ((sorted(rows), "ascending"), (sorted(rows, reverse=True), "descending")):
        browser.click(head)
        assert list(map(int, browser.evaluate(FIRST_CELLS.format(column=1)))) == expected
        assert browser.evaluate("document.querySelector('#tables th:nth-child(2)').ariaSort") == order
    browser.click("#tables th button")
    assert browser.evaluate(FIRST_CELLS.format(column=0)) == [table.table for table in FULL.skew]  # C2 before C10
    browser.click("#records th:nth-child(6) button")
    kinds = browser.evaluate("[...document.querySelectorAll('#records tbody tr')].map(row => row.className)")
    count = sum(record.error is not None for record in FULL.records)
    assert kinds[-count:] == ["failed"] * count
    assert "failed" not in kinds[:-count]


def test_times_follow_the_readers_link_and_rows(browser, reports):
    show(browser, reports / "full.html")
    cells = "#records tbody tr:not(.failed) td[data-bytes]"
    times = f"[...document.querySelectorAll({cells!r})].map(cell => Number(cell.dataset.v))"
    plot = "document.querySelector('#traffic .plot').data[0].y"
    choose = (
        "(s => { s.value = '2'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('#traffic select[data-choice=unit]'))"
    )
    browser.evaluate(choose)
    enter = (
        "(i => {{ i.value = '{value}'; i.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        "(document.querySelector('#link input[name={name}]'))"
    )
    before, drawn = browser.evaluate(times), browser.evaluate(plot)
    assert before[1] > 0
    assert min(drawn) > 0
    browser.evaluate(enter.format(name="bandwidth", value="0.125"))
    assert browser.evaluate(times) == pytest.approx([10 * time for time in before])
    assert browser.evaluate(plot) == pytest.approx([10 * time for time in drawn])
    browser.evaluate(enter.format(name="row_bytes", value="272"))  # twice the 136 of the samples
    assert browser.evaluate(times) == pytest.approx([20 * time for time in before])
    assert browser.evaluate("document.querySelector('dd[data-bytes]').textContent").endswith(" ms")
    browser.evaluate(enter.format(name="bandwidth", value="fast"))
    assert browser.evaluate(f"document.querySelector({cells!r}).textContent") == "–"
    assert browser.problems == []


def test_the_curve_under_the_pointer_is_lifted(browser, reports):
    show(browser, reports / "full.html")
    plot = "document.querySelector('#skew .plot')"
    widths = f"{plot}.data.map(trace => [trace.line.width, trace.opacity ?? 1])"
    before = browser.evaluate(widths)
    assert len(before) == 17
    browser.evaluate("document.querySelector('#skew .plot').scrollIntoView({block: 'center'})")
    place = (
        f"(plot => {{ const box = plot.querySelector('.nsewdrag').getBoundingClientRect(), l = plot._fullLayout, "
        f"t = plot.data[12]; return [box.x + l.xaxis.d2p(t.x[20]), box.y + l.yaxis.d2p(t.y[20])]; }})({plot})"
    )
    x, y = browser.evaluate(place)
    restyled = f"void (window.restyled = new Promise(done => {plot}.once('plotly_restyle', () => done(true))))"
    browser.evaluate(restyled)
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert browser.evaluate("window.restyled")
    lifted = browser.evaluate(widths)
    assert lifted[12] == [4, 1]
    assert {opacity for number, (_, opacity) in enumerate(lifted) if number != 12} == {0.25}
    assert "C5 · " in browser.evaluate("document.querySelector('#skew .hovertext').textContent")
    browser.evaluate(restyled)
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    assert browser.evaluate("window.restyled")
    assert browser.evaluate(widths) == before
    legend = "[...document.querySelectorAll('#skew .legendtext')].map(text => text.textContent)"
    assert browser.evaluate(legend)[-1] == "9 smaller tables"


def test_a_wide_table_says_that_it_goes_on(browser, reports):
    show(browser, reports / "full.html", width=PHONE)
    box = "document.querySelector('#records').closest('.wide')"
    assert browser.evaluate(f"{box}.querySelector('.more').textContent") == (
        "Scroll the table: more columns to the right, more rows below"
    )
    assert browser.evaluate(f"{box}.classList.contains('right')")
    end = (
        f"new Promise(done => {{ const frame = {box}.querySelector('.scroll'); "
        f"frame.addEventListener('scroll', () => done({box}.querySelector('.more').hidden)); "
        "frame.scrollTo(frame.scrollWidth, frame.scrollHeight); })"
    )
    assert browser.evaluate(end)
    assert not browser.evaluate(f"{box}.classList.contains('right')")


def test_the_browser_is_confined(browser):
    """The process that reads the page has a filter of system calls (`Seccomp: 2`), and none runs as root."""
    if not browser.way.sandbox:
        pytest.skip(f"the browser runs {browser.way}, because {'; '.join(browser.reasons)}")
    filters = []
    for pid in descendants(browser.pid):
        words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split()  # forked ones have spaces there
        assert "--no-sandbox" not in words
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert "0" not in status["Uid"].split()
        if "--type=renderer" in words:
            filters.append(status["Seccomp"].strip())
    assert set(filters) == {"2"}


def descendants(pid: int) -> list[int]:
    """Process numbers of a process and all that it started."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [pid, *(number for child in children for number in descendants(int(child)))]


def test_a_browser_that_starts_in_no_way_says_why():
    with tempfile.TemporaryDirectory() as name:
        program = Path(name) / "chromium"
        program.write_text("#!/bin/sh\necho 'No usable sandbox!' >&2\nexit 1\n")
        for path in (program.parent, program):
            path.chmod(0o755)
        browser = Browser(program)
        with pytest.raises((EOFError, OSError), match="it says: No usable sandbox!"):
            browser.__enter__()
    first, *_ = browser.reasons
    assert first.startswith(f"as user {os.getuid() or 65534}, with its sandbox: ")
    assert first.endswith("it says: No usable sandbox!")
    assert len(browser.reasons) == (2 if os.getuid() == 0 else 1)
