"""The page as a file: complete, reproducible, safe against network access and hostile text. Needs no browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagpipe.forecast.report import view as view_module
from bagpipe.forecast.report import write_report
from bagpipe.forecast.report.page import render_page
from bagpipe.forecast.report.view import label, view_of
from tests.forecast.report.views import HOSTILE, VIEWS, made
from tests.report.html_reader import HtmlReader, check_self_contained


@pytest.mark.parametrize("name", VIEWS)
def test_the_page_is_complete_and_loads_nothing(name: str) -> None:
    check_self_contained(HtmlReader(render_page(made(name))))


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        write_report(tmp_path / name, made("full"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_the_recommendation_is_on_top() -> None:
    view = made("full")
    text = render_page(view)
    assert text.index("<h2>Recommended: batch ") < text.index("<figure")
    for name, point in (("fastest", view.best.fastest), ("cheapest", view.best.cheapest)):
        assert name in text.lower()
        assert label(point, view.varied) in text
    settings = view.best.knee.settings
    assert (f"--data.batch_size {settings['batch_examples']}" in text) == (settings["policy"] != "direct")


def test_one_point_is_named_once() -> None:
    text = render_page(made("single"))
    assert "Recommended and fastest and cheapest" in text
    assert "Points that cannot run" not in text


def test_points_that_cannot_run_are_counted() -> None:
    view = made("full")
    failed = sum(bool(point.error) for point in view.points)
    assert f"{failed:,} of {len(view.points):,} points cannot run." in render_page(view)


def test_a_thinned_front_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "_MOST", 2)
    view = view_of(made("full").points, cluster="c", replay="r", model="m")
    assert f"{len(view.front)} of the {view.front_size} points that no other one beats, at even distances." in (
        render_page(view)
    )


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "attack.html"
    write_report(path, made("attack"))
    text = path.read_text(encoding="utf-8")
    assert HOSTILE[:20] not in text
    assert "<img" not in text
    assert HtmlReader(text).texts["code", None].startswith(HOSTILE.replace("\udcff", "\\udcff"))
