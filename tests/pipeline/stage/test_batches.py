from __future__ import annotations

import torch

from bagpipe.pipeline.stage.batches import Batches, StageBatch
from bagpipe.pipeline.stage.channel import Channel


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
    given, shares = batches([9]).get(0)
    assert given.num_global_examples == 100
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
