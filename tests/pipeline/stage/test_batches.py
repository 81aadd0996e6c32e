from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.pipeline.stage.batches import Batches, StageBatch, bounds, count_users, pieces
from bagpipe.pipeline.stage.channel import Channel, Piece
from bagpipe.schedule.ir.program import overlapping_units

example_counts = st.integers(0, 60)
unit_counts = st.integers(1, 12)


def channel(*, pipe: int, units: int, receiver_units: int) -> Channel:
    return Channel(
        number=0,
        sender=0,
        receiver=1,
        pipe=pipe,
        numbers=(),
        values=(),
        units=units,
        receiver_units=receiver_units,
        copies=False,
        link=None,
        device=torch.device("cpu"),
    )


def batches(sizes: list[int]) -> Batches:
    return Batches(
        lambda number: StageBatch(inputs=None, num_examples=sizes[number], num_global_examples=100),
        num_pipes=2,
        units={0: (0, 2), 1: (1, 4)},
        channels=[channel(pipe=1, units=4, receiver_units=2)],
    )


def test_pipes_share_the_replicas_examples_and_micro_batches_their_pipes() -> None:
    batch, shares = batches([9]).get(0)
    assert batch.num_global_examples == 100
    assert shares.pipes == (0, 4, 9)
    assert shares.instances == {0: (0, 2, 4), 1: (0, 1, 2, 3, 5)}
    flow = shares.flows[0]
    assert flow.starts == (0, 1, 2, 3, 5)
    assert [[piece.unit for piece in made] for made in flow.made] == [[0, 1], [2, 3]]
    assert flow.users == (1, 1, 1, 1)


def test_shares_are_worked_out_once_per_size() -> None:
    known = batches([8, 8, 5])
    assert known.get(0)[1] is known.get(1)[1]
    assert known.get(2)[1] is not known.get(1)[1]


def test_any_number_of_sizes_takes_bounded_memory() -> None:
    known = batches(list(range(500)))
    for number in range(500):
        assert known.get(number)[1].pipes[2] == number
    assert len(known._known) <= 64


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
    assert count_users(narrower, 2) == (2, 2)


@given(count=example_counts, sending=unit_counts, receiving=unit_counts)
def test_pieces_hold_every_example_once_and_in_order(count: int, sending: int, receiving: int) -> None:
    sender, receiver = bounds(count, sending), bounds(count, receiving)
    made = pieces(sender, receiver)
    held = [
        [example for p in unit for example in range(sender[p.unit] + p.first, sender[p.unit] + p.end)] for unit in made
    ]
    assert held == [list(range(receiver[m], receiver[m + 1])) for m in range(receiving)]
    assert all(p.whole == (p.end - p.first == sender[p.unit + 1] - sender[p.unit]) for unit in made for p in unit)
    assert sum(count_users(made, sending)) == sum(map(len, made))


@given(count=example_counts, sending=unit_counts, receiving=unit_counts)
def test_a_schedule_waits_for_all_that_is_taken(count: int, sending: int, receiving: int) -> None:
    for unit, made in enumerate(pieces(bounds(count, sending), bounds(count, receiving))):
        assert {piece.unit for piece in made} <= set(overlapping_units(unit, receiving, sending))
