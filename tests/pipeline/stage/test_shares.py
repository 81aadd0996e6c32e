from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.pipeline.stage.shares import Piece, bounds, pieces, uses
from bagpipe.schedule.ir.program import overlapping_units

counts = st.integers(0, 60)
units = st.integers(1, 12)


def test_bounds_spread_the_rest() -> None:
    assert bounds(10, 4) == (0, 2, 5, 7, 10)
    assert bounds(2, 4) == (0, 0, 1, 1, 2)
    assert bounds(0, 3) == (0, 0, 0, 0)


def test_a_micro_batch_is_made_of_parts_of_the_senders() -> None:
    whole = pieces(bounds(8, 2), bounds(8, 2))
    assert whole == ((Piece(0, 0, 4, True),), (Piece(1, 0, 4, True),))
    wider = pieces(bounds(8, 4), bounds(8, 2))
    assert wider[1] == (Piece(2, 0, 2, True), Piece(3, 0, 2, True))
    narrower = pieces(bounds(8, 2), bounds(8, 4))
    assert narrower[3] == (Piece(1, 2, 4, False),)
    assert uses(narrower, 2) == (2, 2)


@given(count=counts, sending=units, receiving=units)
def test_pieces_hold_every_example_once_and_in_order(count: int, sending: int, receiving: int) -> None:
    sender, receiver = bounds(count, sending), bounds(count, receiving)
    made = pieces(sender, receiver)
    held = [
        [example for p in unit for example in range(sender[p.unit] + p.first, sender[p.unit] + p.end)] for unit in made
    ]
    assert held == [list(range(receiver[m], receiver[m + 1])) for m in range(receiving)]
    assert all(p.whole == (p.end - p.first == sender[p.unit + 1] - sender[p.unit]) for unit in made for p in unit)
    assert sum(uses(made, sending)) == sum(map(len, made))


@given(count=counts, sending=units, receiving=units)
def test_a_schedule_waits_for_all_that_is_taken(count: int, sending: int, receiving: int) -> None:
    for unit, made in enumerate(pieces(bounds(count, sending), bounds(count, receiving))):
        assert {piece.unit for piece in made} <= set(overlapping_units(unit, receiving, sending))
