"""Two ranks train the examples as one process does on their batches together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagpipe.distributed.membership import Membership
from tests.distributed.processes import run_ranks
from tests.effort import some_of
from tests.examples.plain import doubled, plain_training
from tests.examples.samples import SAMPLES
from tests.examples.trained import piped_training
from tests.train_pipeline.rank_jobs import join

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

WORLD_SIZE = 2
NUM_STEPS = 8
#: Fewer than the rows of all steps in most examples.
CACHE_ROWS = 800
#: Ranks sum in another order. Where contributions nearly cancel, the sum has a larger relative error, and Adagrad
#: divides by a root of the sum's square: one weight of 320,000 differs by 2e-12.
ATOL = 1e-11
#: torchrec's DLRMTrain has its loss in float32, whatever the model's dtype.
LOSS_ATOL = 1e-7


def one_rank(membership: Membership, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank, told of the others as torchrun tells it. Rank r trains batches r, r + 2, r + 4, …"""
    torch.set_num_threads(1)
    join(membership)
    sample = SAMPLES[name]
    batches = list(sample.batches(NUM_STEPS * WORLD_SIZE))[membership.rank :: WORLD_SIZE]
    trained = piped_training(sample, map(doubled, batches), dtype="float64", **settings)
    return {
        "losses": trained.losses,
        "dense": {name: value.numpy() for name, value in trained.dense.items()},
        "tables": {name: value.numpy() for name, value in trained.tables.items()},
    }


@pytest.mark.parametrize("name", some_of([*SAMPLES], {1, 3}))
def test_two_ranks_equal_plain_pytorch(name, redis_server, namespace):
    sample = SAMPLES[name]
    settings = {"store": redis_server.url, "namespace": namespace, "lookahead": 4, "cache_rows": CACHE_ROWS}
    ends = run_ranks(WORLD_SIZE, one_rank, name, settings)
    assert [end.error for end in ends] == [None] * WORLD_SIZE
    plain = plain_training(
        sample.model(),
        sample.batches(NUM_STEPS * WORLD_SIZE),
        rows=sample.rows,
        dense=sample.dense,
        num_parts=WORLD_SIZE,
    )
    of_ranks = zip(*(end.value["losses"] for end in ends), strict=True)
    assert [sum(losses) / WORLD_SIZE for losses in of_ranks] == pytest.approx(plain.losses, rel=0, abs=LOSS_ATOL)
    for end in ends:
        for kind in ("dense", "tables"):
            expected = getattr(plain, kind)
            assert end.value[kind].keys() == expected.keys()
            for key, value in end.value[kind].items():
                torch.testing.assert_close(torch.from_numpy(value), expected[key], rtol=0, atol=ATOL)
