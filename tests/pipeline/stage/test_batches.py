from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.pipeline.stage.batches import Batches, StageBatch, bounds, count_users, microbatch_slices
from bagpipe.pipeline.stage.channel import Channel, MicrobatchSlice
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
    batch, division = batches([9]).get(0)
    assert batch.num_global_examples == 100
    assert division.pipes == (0, 4, 9)
    assert division.instances == {0: (0, 2, 4), 1: (0, 1, 2, 3, 5)}
    flow = division.flows[0]
    assert flow.starts == (0, 1, 2, 3, 5)
    assert [[part.unit for part in slices] for slices in flow.slices] == [[0, 1], [2, 3]]
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
    whole = microbatch_slices(bounds(8, 2), bounds(8, 2))
    assert whole == ((MicrobatchSlice(0, 0, 4, True),), (MicrobatchSlice(1, 0, 4, True),))
    wider = microbatch_slices(bounds(8, 4), bounds(8, 2))
    assert wider[1] == (MicrobatchSlice(2, 0, 2, True), MicrobatchSlice(3, 0, 2, True))
    narrower = microbatch_slices(bounds(8, 2), bounds(8, 4))
    assert narrower[3] == (MicrobatchSlice(1, 2, 4, False),)
    assert count_users(narrower, 2) == (2, 2)


@given(count=example_counts, sending=unit_counts, receiving=unit_counts)
def test_pieces_hold_every_example_once_and_in_order(count: int, sending: int, receiving: int) -> None:
    sender, receiver = bounds(count, sending), bounds(count, receiving)
    slices = microbatch_slices(sender, receiver)
    held = [
        [example for p in unit for example in range(sender[p.unit] + p.first, sender[p.unit] + p.end)]
        for unit in slices
    ]
    assert held == [list(range(receiver[m], receiver[m + 1])) for m in range(receiving)]
    assert all(p.whole == (p.end - p.first == sender[p.unit + 1] - sender[p.unit]) for unit in slices for p in unit)
    assert sum(count_users(slices, sending)) == sum(map(len, slices))


@given(count=example_counts, sending=unit_counts, receiving=unit_counts)
def test_a_schedule_waits_for_all_that_is_taken(count: int, sending: int, receiving: int) -> None:
    for unit, slices in enumerate(microbatch_slices(bounds(count, sending), bounds(count, receiving))):
        assert {part.unit for part in slices} <= set(overlapping_units(unit, receiving, sending))
