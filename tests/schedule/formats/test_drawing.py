from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from bagpipe.schedule.formats.drawing import Drawing, fill_of
from bagpipe.schedule.ir.actions import parse


def elements(drawing: Drawing, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(str(drawing)).findall(f".//{{*}}{name}")


def test_the_first_label_that_fits_is_shown() -> None:
    drawing = Drawing(200, 50)
    for width in (100, 30, 5):
        drawing.box(10, 5, width, 20, fill="red", title="GET", labels=("GET 1234", "GET"))
    assert [text.text for text in elements(drawing, "text")] == ["GET 1234", "GET"]
    assert [title.text for title in elements(drawing, "title")] == ["GET"] * 3
    assert [box.get("width") for box in elements(drawing, "rect")[1:]] == ["100.00", "30.00", "5.00"]


def test_texts_are_escaped() -> None:
    drawing = Drawing(200, 50)
    drawing.text(0, 10, "a < b & c", anchor="end")
    drawing.box(0, 0, 100, 10, fill=drawing.hatching("wait", "#bbb"), title="<0>", labels=("<1>",))
    assert [text.text for text in elements(drawing, "text")] == ["a < b & c", "<1>"]
    assert elements(drawing, "title")[0].text == "<0>"
    assert elements(drawing, "rect")[1].get("fill") == "url(#wait)"
    assert elements(drawing, "pattern")[0].get("id") == "wait"


def test_lines() -> None:
    drawing = Drawing(200, 50)
    drawing.line(1, 2, 3, 4, stroke="black")
    assert [elements(drawing, "line")[0].get(end) for end in ("x1", "y1", "x2", "y2")] == ["1.00", "2", "3.00", "4"]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("0F0", "3F7", True),
        ("0F0", "0B0", False),
        ("0F0", "0F0~1", False),
        ("0B0~1", "0I0~1", True),
        ("0SENDX_F0:1", "0SEND_B3", True),
        ("0SENDX_F0:1", "1RECVX_F0:0", False),
        ("0X_READ0", "0X_PLAN0", True),
    ],
)
def test_colours(one: str, other: str, alike: bool) -> None:
    assert (fill_of(parse(one)) == fill_of(parse(other))) is alike
