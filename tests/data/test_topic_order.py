"""The order of a topic's offsets: turns of its partitions, and legs from one end of the stream to the next."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import InputError
from data.topic_order import Leg, Turn, leg_of


def turns(leg: Leg, count: int) -> list[tuple[int, int, int]]:
    return [(turn.partition, turn.start, turn.stop) for turn in map(leg.turn, range(count))]


def test_partitions_are_read_in_turns() -> None:
    leg = Leg(start=(5, 0), stop=None, run=10)
    assert turns(leg, 4) == [(0, 5, 15), (1, 0, 10), (0, 15, 25), (1, 10, 20)]
    assert [leg.offsets(number) for number in range(4)] == [(5, 0), (15, 0), (15, 10), (25, 10)]


def test_a_closed_leg_is_cut_where_the_stream_ended() -> None:
    leg = Leg(start=(5, 0), stop=(18, 4), run=10)
    assert leg.num_turns() == 3
    assert turns(leg, 4) == [(0, 5, 15), (1, 0, 4), (0, 15, 18), (1, 4, 4)]
    assert Leg(start=(5, 0), stop=(5, 0), run=10).num_turns() == 0


@given(
    start=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    run=st.integers(1, 9),
    more=st.lists(st.integers(0, 25), min_size=4, max_size=4),
    data=st.data(),
)
def test_every_offset_is_read_once_and_in_order(
    start: list[int], run: int, more: list[int], data: st.DataObject
) -> None:
    """The stream ends after some turns, at any offsets at or after those read; nothing is lost or read twice."""
    leg = Leg(start=tuple(start), stop=None, run=run)
    ends = tuple(first + each for first, each in zip(start, more, strict=False))
    number = 0
    while leg.turn(number).stop <= ends[leg.turn(number).partition] and data.draw(st.booleans()):
        number += 1
    read = [leg.turn(each) for each in range(number)]
    closed = leg.closed(ends, number)
    assert closed.stop == ends
    assert [closed.turn(each) for each in range(number)] == read
    read += [turn for each in range(number, closed.num_turns()) if (turn := closed.turn(each)).start < turn.stop]
    for partition, (first, end) in enumerate(zip(start, ends, strict=True)):
        own = [offset for turn in read if turn.partition == partition for offset in range(turn.start, turn.stop)]
        assert own == list(range(first, end))
    assert closed.offsets(closed.num_turns()) == ends


def test_a_leg_keeps_what_was_read_beyond_an_end() -> None:
    assert Leg(start=(0, 0), stop=None, run=10).closed((3, 30), 1).stop == (10, 30)


def test_a_place_is_the_leg_and_the_turn() -> None:
    for leg in (Leg(start=(5, 0), stop=None, run=10), Leg(start=(5, 0), stop=(18, 4), run=10)):
        place = json.loads(json.dumps(leg.to_place(2)))
        assert place["offsets"] == [15, 10 if leg.stop is None else 4]
        assert leg_of(place, "clicks", 2, 10) == (leg, 2)
    assert Leg(start=(0,), stop=None, run=3).turn(1) == Turn(partition=0, start=3, stop=6)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({}, "loader state: expected offsets of clicks, got"),
        ({"start": [0, -1], "stop": None, "turn": 0}, "loader state: expected offsets of clicks, got"),
        ({"start": [0, 0], "stop": None, "turn": True}, "loader state: expected offsets of clicks, got"),
        ({"start": [0, 0], "stop": "x", "turn": 0}, "loader state: expected offsets of clicks, got"),
        ({"start": [0], "stop": None, "turn": 0}, "clicks: expected the 1 partitions of the job so far, got 2"),
    ],
)
def test_a_place_from_a_stranger_is_refused(place: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        leg_of(place, "clicks", 2, 10)
