from __future__ import annotations

import pytest

from bagpipe.schedule.formats.legend import entries, short_labels, ticks
from bagpipe.schedule.ir.actions import parse


def test_an_operation_is_named_once_with_its_meaning():
    legend = entries(map(parse, ["0F0", "0F1", "0F1~1", "0X_FETCH0", "0SENDX_F0:1", "1RECVX_F0:0"]), width_px=1200)
    assert [entry.text for entry in legend] == ["F", "F of other pipes", "send", "recv", "FETCH"]
    assert len({entry.fill for entry in legend}) == len(legend)
    assert legend[-1].meaning == "X_FETCH: fetch rows missing from the cache: store to staging"


def test_a_narrow_legend_has_more_rows():
    actions = [parse(text) for text in ("0F0", "0B0", "0X_FETCH0", "0X_WRITEBACK0", "0OPT0")]
    wide, narrow = entries(actions, width_px=1200), entries(actions, width_px=150, more=[("url(#wait)", "waiting")])
    assert {entry.row for entry in wide} == {0}
    assert [entry.row for entry in narrow] == sorted(entry.row for entry in narrow)
    assert all(entry.x < 150 for entry in narrow)
    assert narrow[-1].text == "waiting"
    assert narrow[-1].row > 1


def test_labels_get_shorter():
    assert short_labels(parse("0X_FETCH3")) == ("0X_FETCH3", "FETCH3", "FETCH", "3")
    assert short_labels(parse("0F3")) == ("0F3", "F3", "F", "3")
    assert short_labels(parse("(0F7;7B3)OVERLAP_F_B")) == ("(0F7;7B3)OVERLAP_F_B",)


@pytest.mark.parametrize(
    ("length", "width_px", "expected"),
    [
        (10, 501, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (23, 200, [0, 10, 20]),
        (0.04, 300, [0, 0.01, 0.02, 0.03, 0.04]),
        (0, 300, [0]),
        (7, 10, [0]),
    ],
)
def test_ticks_are_round_and_apart(length, width_px, expected):
    assert ticks(length, width_px, 50) == pytest.approx(expected)
