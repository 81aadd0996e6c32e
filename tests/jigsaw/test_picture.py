from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from bagpipe.jigsaw.picture import fills_of, grid, letter_of, perfetto, shown_s, svg
from bagpipe.jigsaw.policy import POLICIES
from bagpipe.jigsaw.simulate import run_jobs
from bagpipe.jigsaw.timeline import Timeline
from tests.jigsaw.made_jobs import job

HOSTILE = "<b>&\"'"


def made(**more: int) -> Timeline:
    return run_jobs([job(HOSTILE, arrival_s=2.0, **more), job("b", workers=1, arrival_s=3.0)], 2, POLICIES["jigsaw"])


def test_a_grid_begins_at_the_first_arrival() -> None:
    assert grid(made(iterations=1)) == (
        "rank 0      AaaBbb.Bbb.Bbb.Bbb.\n"
        "rank 1      Aaa................\n"
        "exchange A  ...=...............\n"
        "exchange B  ......=...=...=...=\n"
        f"A {HOSTILE}, B b; capital: forward, small: backward; a column is 1 s\n"
    )


def test_a_long_grid_is_cut() -> None:
    lines = grid(made(iterations=300), columns=50).splitlines()
    assert {len(line) for line in lines[:-1]} == {12 + 50}
    assert re.search(r"a column is 1 s; the first 50 s of [\d.]+$", lines[-1])
    assert shown_s(made(iterations=300), 50) == 50.0


def test_an_svg_has_a_box_for_each_phase() -> None:
    timeline = made(iterations=2)
    tree = ElementTree.fromstring(svg(timeline))
    titles = [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}title")]
    boxes = 2 * len(timeline.pieces) + len(timeline.exchanges)
    assert len([title for title in titles if "iteration" in title]) == boxes
    assert f"{HOSTILE}, iteration 1, worker 0: forward" in titles
    texts = [each.text or "" for each in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "jigsaw, full backward" in texts


def test_a_long_svg_is_cut() -> None:
    text = svg(made(iterations=3000), width_px=600)
    assert len(text) < 400_000
    assert "; the first " in text


def test_a_trace_has_everything() -> None:
    timeline = made(iterations=2)
    events = json.loads(perfetto(timeline))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * len(timeline.pieces) + len(timeline.exchanges)
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == [
        *("rank 0", "rank 1", "exchange A", "exchange B")
    ]
    assert min(span["ts"] for span in spans) == 2e6


def test_many_jobs_have_names_and_colours() -> None:
    assert [letter_of(number) for number in (0, 25, 26, 52)] == ["A", "Z", "A1", "A2"]
    assert fills_of(0) == fills_of(8) != fills_of(1)
