"""`StepSizes`: the sizes of the steps of all stages, on every rank."""

from __future__ import annotations

import torch
from torch import nn

from bagpipe.dense.precondition.kfac import Kfac, KfacSettings
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.dense.precondition.step_sizes import StepSizes
from bagpipe.testing.local_peers import LocalPeers
from tests.distributed.threads import run_threads


def kfac_of(*sizes: float) -> Kfac:
    """K-FAC of as many layers, whose latest batch had these sizes."""
    kfac = Kfac(linear_layers(nn.Sequential(*(nn.Linear(1, 1) for _ in sizes))), KfacSettings())
    kfac.sizes = torch.tensor(sizes)
    return kfac


def test_one_rank_has_all_stages() -> None:
    sizes = StepSizes({2: 1, 0: 2}, gives=frozenset({0, 2}))
    sizes.add_up({0: kfac_of(1.0, 2.0), 2: kfac_of(3.0)})
    assert sizes.all is not None
    assert sizes.all.tolist() == [1, 2, 3]


def test_each_stage_is_counted_once() -> None:
    """Rank 0 holds stages 0 and 1, rank 1 holds stages 1 and 2; the first holder gives."""

    def work(peers: LocalPeers) -> list[float]:
        (group,) = peers.open_stage_groups([range(2)]).values()
        own = [{0: kfac_of(1.0), 1: kfac_of(2.0, 3.0)}, {1: kfac_of(2.0, 3.0), 2: kfac_of(4.0)}][peers.rank]
        gives = [frozenset({0, 1}), frozenset({2})][peers.rank]
        sizes = StepSizes({0: 1, 1: 2, 2: 1}, gives=gives, group=group)
        sizes.add_up(own)
        assert sizes.all is not None
        return sizes.all.tolist()

    assert [each.value for each in run_threads(2, work)] == [[1, 2, 3, 4]] * 2
