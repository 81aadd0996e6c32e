"""`PlainGroup` over gloo, under K-FAC of a DistributedDataParallel model."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd import backward
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from bagpipe.dense.precondition.kfac import FactorSource, KfacSettings
from bagpipe.dense.precondition.optimizer import KfacOptimizer
from bagpipe.distributed.membership import Membership
from bagpipe.distributed.plain_group import PlainGroup
from tests.dense.precondition.reference import Reference, batch_of, small_model
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.multiproc

LR = 0.3
STEPS = 4
#: Kept to the end of the rank's process, which frees nothing: freeing a DistributedDataParallel model drops its process
#: group with the interpreter's lock held, and waits for gloo's threads, which may need the lock to drop a tensor.
_KEPT: list[DistributedDataParallel] = []


def train(membership: Membership, factors: FactorSource) -> list[list[float]]:
    """Weights after some steps on this rank's half of each batch."""
    store = dist.TCPStore("127.0.0.1", membership.port, None, False, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=membership.rank, world_size=membership.world_size)
    try:
        model = small_model()
        settings = KfacSettings(factors=factors)
        sgd = torch.optim.SGD(model.parameters(), lr=LR)
        optimizer = KfacOptimizer(model, sgd, settings=settings, group=PlainGroup())
        parallel = DistributedDataParallel(model)
        _KEPT.append(parallel)
        for step in range(STEPS):
            inputs, labels = (each[membership.rank :: 2] for each in batch_of(step))
            backward(binary_cross_entropy_with_logits(parallel(inputs).squeeze(1), labels))
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("factors", ["summed", "local"])
def test_kfac_of_a_parallel_model(factors: FactorSource) -> None:
    """Summed factors are those of the whole batch, local ones those of the owner's half."""
    reference = Reference(small_model(), KfacSettings(), LR)
    halves = range(0, 6, 2), range(1, 6, 2)
    for step in range(STEPS):
        owned = [halves[0], halves[1], halves[0]] if factors == "local" else []
        reference.step(*batch_of(step), owned=owned)
    first, second = (each.value for each in run_ranks(2, train, factors))
    assert first == second
    found = torch.tensor(first[0], dtype=torch.float64).view(3, 4)
    expected = reference.weights[0][:, :-1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
