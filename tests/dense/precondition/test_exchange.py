"""`KfacExchange`: factors to their owners, gradients from them, over ranks in threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bagpipe.dense.precondition.exchange import KfacExchange
from bagpipe.dense.precondition.factors import BatchSums
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.testing.local_peers import LocalPeers
from tests.dense.precondition.reference import small_model
from tests.distributed.threads import run_threads


def on_ranks(work: Any) -> list[Any]:
    ended = run_threads(3, work)
    assert [each.error for each in ended] == [None] * 3
    return [each.value for each in ended]


def opened(peers: LocalPeers) -> KfacExchange:
    (group,) = peers.open_stage_groups([range(peers.world_size)]).values()
    return KfacExchange(group, linear_layers(small_model()), [2, 0, 2])


def test_sums_of_all_ranks_reach_the_owners() -> None:
    def work(peers: LocalPeers) -> dict[int, tuple[float, list[float]]]:
        own = {}
        for number, layer in enumerate(linear_layers(small_model())):
            sums = BatchSums.zeros(layer.num_inputs, layer.num_outputs, layer.weight)
            sums.inputs += 10 * number + peers.rank
            sums.counts += peers.rank
            own[number] = sums
        if peers.rank == 1:
            del own[1]  # a rank without examples
        found = opened(peers).add_up(own)
        return {n: (float(each.inputs[0, 0]), each.counts.tolist()) for n, each in found.items()}

    assert on_ranks(work) == [{1: (22.0, [2, 2])}, {}, {0: (3.0, [3, 3]), 2: (63.0, [3, 3])}]


def test_every_rank_gets_the_gradients_of_the_owners() -> None:
    def work(peers: LocalPeers) -> tuple[list[Tensor | None], Tensor]:
        gradients: list[Tensor | None] = [
            torch.full((layer.num_outputs, layer.num_inputs), float(peers.rank), dtype=torch.float64)
            for layer in linear_layers(small_model())
        ]
        gradients[2] = None  # no rank has one
        sizes = torch.full((3,), 100.0 + peers.rank, dtype=torch.float64)
        return opened(peers).share(gradients, sizes), sizes

    for rank, (gradients, sizes) in enumerate(on_ranks(work)):
        assert [None if each is None else each.unique().tolist() for each in gradients] == [[2.0], [0.0], None]
        assert sizes.tolist() == [102.0, 100.0, 100.0 + rank]
