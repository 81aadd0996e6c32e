"""`HtmlReader`: a report as elements and texts; `check_self_contained`: what every report must be."""

from __future__ import annotations

import json
from html.parser import HTMLParser

__all__ = ["HtmlReader", "check_self_contained"]

VOID = {"meta", "br", "img", "link", "input", "hr", "base"}


class HtmlReader(HTMLParser):
    """Elements, attributes and texts; elements must close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: dict[tuple[str, str | None], str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend((tag, name, value) for name, value in attrs)
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        key = self.open[-1] if self.open else ("", None)
        self.texts[key] = self.texts.get(key, "") + data


def check_self_contained(page: HtmlReader) -> None:
    """Check that a page loads nothing, runs its own scripts only, and has a place for each of its charts."""
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
