"""The page as a file: complete, reproducible, safe against network access and hostile text. Needs no browser."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from data.replay.report import write_report
from data.replay.report.page import render_page
from tests.data.replay.report.samples import ALL, FULL, HOSTILE

VOID = {"meta", "br", "img", "link", "input", "hr", "base"}


class Reader(HTMLParser):
    """Elements, attributes and texts; elements must close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, *attribute) for attribute in attrs)
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        key = self.open[-1] if self.open else ("", None)
        self.texts[key] = self.texts.get(key, "") + data


@pytest.mark.parametrize("name", ALL)
def test_the_page_is_complete_and_loads_nothing(name):
    page = Reader(render_page(ALL[name]))
    assert not {"img", "link", "iframe", "object", "base"} & set(page.tags)
    assert not [item for item in page.attributes if item[1] in {"src", "href", "action", "srcset"}]
    assert not [item for item in page.attributes if item[1].startswith("on")]
    assert page.tags.count("script") == 3
    style = page.texts["style", None]
    assert "url(" not in style
    assert "@import" not in style
    figures = json.loads(page.texts["script", "figures"])
    assert set(figures) == {value for tag, key, value in page.attributes if (tag, key) == ("figure", "id")}
    ids = [value for _, key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))


def test_data_without_a_file_are_named_by_their_format():
    assert "<title>Replay of synthetic data</title>" in render_page(
        dataclasses.replace(FULL, path="", format="synthetic")
    )


def test_the_page_forbids_loading():
    assert "default-src 'none'" in render_page(FULL)


def test_the_chart_library_is_inside():
    assert Reader(render_page(FULL)).texts["script", "library"] == get_plotlyjs()


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
    assert Reader(text).texts["code", None].startswith(shown)  # the path in the heading
