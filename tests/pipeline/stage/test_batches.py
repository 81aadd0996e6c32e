from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.pipeline.stage.batches import Batches, Flow, StageBatch, bounds, flow, part_intervals
from bagpipe.pipeline.stage.channel import Channel, MicrobatchSlice
from bagpipe.schedule.ir.program import overlapping_units

example_counts = st.integers(0, 60)
unit_counts = st.integers(1, 12)
part_counts = st.integers(1, 4)


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
        units={0: (0, 2, 0, 1), 1: (1, 4, 1, 2)},
        channels=[channel(pipe=1, units=4, receiver_units=2)],
    )


def test_pipes_share_the_replicas_examples_and_micro_batches_their_pipes() -> None:
    batch, division = batches([9]).get(0)
    assert batch.num_global_examples == 100
    assert division.pipes == (0, 4, 9)
    assert division.instances == {0: ((0, 2), (2, 4)), 1: ((0, 1), (1, 2), (3, 3), (4, 5))}
    assert division.senders == (((0, 1), (1, 2), (2, 3), (3, 5)),)
    found = division.flows[0]
    assert [[part.unit for part in slices] for slices in found.slices] == [[0, 1], [2, 3]]
    assert found.users == (1, 1, 1, 1)


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
    whole = flow(part_intervals(8, 2), part_intervals(8, 2))
    assert whole.slices == ((MicrobatchSlice(0, 0, 4, True),), (MicrobatchSlice(1, 0, 4, True),))
    wider = flow(part_intervals(8, 4), part_intervals(8, 2))
    assert wider.slices[1] == (MicrobatchSlice(2, 0, 2, True), MicrobatchSlice(3, 0, 2, True, 2))
    narrower = flow(part_intervals(8, 2), part_intervals(8, 4))
    assert narrower.slices[3] == (MicrobatchSlice(1, 2, 4, False),)
    assert narrower.users == (2, 2)


def test_a_message_holds_what_a_part_needs() -> None:
    """The second of two ranks takes rows 2-3 and 6-7 of one micro-batch that the sender makes as a whole."""
    found = flow(part_intervals(8, 1), part_intervals(8, 2, 1, 2))
    assert found.sent == (((2, 4), (6, 8)),)
    assert found.counts == (4,)
    assert found.slices == ((MicrobatchSlice(0, 0, 2, False),), (MicrobatchSlice(0, 2, 4, False),))
    (message,) = found.message(0, [torch.arange(8)])
    assert message.tolist() == [2, 3, 6, 7]


@given(count=example_counts, sending=unit_counts, receiving=unit_counts, parts=st.tuples(part_counts, part_counts))
def test_pieces_hold_every_example_once_and_in_order(
    count: int, sending: int, receiving: int, parts: tuple[int, int]
) -> None:
    """All parts of a sender together give each part of a receiver its examples."""
    flows: list[list[Flow]] = []
    senders = [part_intervals(count, sending, part, parts[0]) for part in range(parts[0])]
    for other in range(parts[1]):
        receiver = part_intervals(count, receiving, other, parts[1])
        flows.append([flow(sender, receiver) for sender in senders])
        for unit, (first, end) in enumerate(receiver):
            held = []
            for sender, found in zip(senders, flows[-1], strict=True):
                for piece in found.slices[unit]:
                    start, stop = sender[piece.unit]
                    (message,) = found.message(piece.unit, [torch.arange(start, stop)])
                    assert len(message) == found.counts[piece.unit]
                    assert piece.whole == (piece.end - piece.first == len(message))
                    held.append((piece.at, message[piece.first : piece.end].tolist()))
            assert [example for _, examples in sorted(held) for example in examples] == list(range(first, end))
    for each in (each for row in flows for each in row):
        assert sum(each.users) == sum(map(len, each.slices))
    for place in range(parts[0]):  # and no example of a sender is left
        assert sum(sum(row[place].counts) for row in flows) == sum(end - first for first, end in senders[place])


@given(count=example_counts, sending=unit_counts, receiving=unit_counts)
def test_a_schedule_waits_for_all_that_is_taken(count: int, sending: int, receiving: int) -> None:
    for unit, slices in enumerate(flow(part_intervals(count, sending), part_intervals(count, receiving)).slices):
        assert {part.unit for part in slices} <= set(overlapping_units(unit, receiving, sending))
