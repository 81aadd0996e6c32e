"""Control of the step on two ranks: the steps are those of a plain loop over both ranks' batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from bagpipe.distributed.membership import Membership
from tests.distributed.processes import run_ranks
from tests.train_pipeline.plain_loop import PlainLoop, assert_close
from tests.train_pipeline.rank_jobs import join
from tests.train_pipeline.small import Small, batches, pipeline, state_of

pytestmark = [pytest.mark.redis, pytest.mark.multiproc]

WORLD_SIZE = 2
NUM_STEPS = 6
#: (step, rank) of the batches with an infinite loss.
BAD = ((2, 1), (4, 0))
MAX_NORM = 0.1


def _batch(step: int, rank: int) -> Any:
    made = batches(NUM_STEPS, seed=10 + rank, dtype=torch.float64)[step]
    if (step, rank) in BAD:
        made["labels"].fill_(float("inf"))
    return made


def _scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=64.0, growth_interval=2)


def one_rank(membership: Membership, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank under a loss scale, with clipping."""
    torch.set_num_threads(1)
    join(membership)
    scaler = _scaler()
    with pipeline(Small().double(), grad_scaler=scaler, **settings) as trained:

        def clip(*_: Any) -> None:
            torch.nn.utils.clip_grad_norm_(trained.model.parameters(), MAX_NORM)

        trained.optimizer.register_step_pre_hook(clip)
        mine = [_batch(step, membership.rank) for step in range(NUM_STEPS)]
        scales = [scaler.get_scale() for _ in trained.train(mine)]
        return {"scales": scales, "state": {name: value.numpy() for name, value in state_of(trained).items()}}


def test_a_batch_that_overflows_on_one_rank_is_left_out_on_all(redis_server: Any, namespace: str) -> None:
    ends = run_ranks(WORLD_SIZE, one_rank, {"store": redis_server.url, "namespace": namespace})
    assert [end.error for end in ends] == [None] * WORLD_SIZE
    loop, scaler, scales = PlainLoop(), _scaler(), []
    for step in range(NUM_STEPS):
        loop.zero_grad()
        losses = [loop.model(_batch(step, rank))[0] for rank in range(WORLD_SIZE)]
        scaler.scale(torch.stack(losses).mean()).backward()
        for optimizer in (loop.dense, loop.rows):
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(loop.model.over.parameters(), MAX_NORM)
        for optimizer in (loop.dense, loop.rows):
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    for end in ends:
        assert end.value["scales"] == scales
        assert_close({name: torch.from_numpy(value) for name, value in end.value["state"].items()}, loop.state())
    assert min(scales) < max(scales)


ACCUMULATE = 3


def one_accumulating_rank(membership: Membership, num_of_ranks: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """A rank that accumulates, and drops two batches of a step first."""
    torch.set_num_threads(1)
    join(membership)
    with pipeline(Small().double(), accumulate=ACCUMULATE, **settings) as trained:
        mine = batches(num_of_ranks[membership.rank], seed=10 + membership.rank, dtype=torch.float64)
        dropped = iter(batches(6, seed=20, dtype=torch.float64))
        for _ in range(2):
            trained.progress(dropped)
        trained.reset()
        # A rank that has joined with nothing has no outputs.
        losses = [trained.loss for outputs in trained.train(mine) if outputs is not None]
        return {
            "losses": [float(loss) for loss in losses if loss is not None],
            "state": {name: value.numpy() for name, value in state_of(trained).items()},
        }


@pytest.mark.parametrize(
    ("num_of_ranks", "settings"),
    [
        ((8, 7), {"cache_rows": "auto"}),  # batches by rank: the last steps have 2 and 1
        ((8, 7), {"cache_rows": 0}),
        ((8, 3), {"uneven": "join"}),
    ],
)
def test_ranks_accumulate_as_one_process(
    num_of_ranks: tuple[int, int], settings: dict[str, Any], redis_server: Any, namespace: str
) -> None:
    settings = {"store": redis_server.url, "namespace": namespace, **settings}
    ends = run_ranks(WORLD_SIZE, one_accumulating_rank, num_of_ranks, settings)
    assert [end.error for end in ends] == [None] * WORLD_SIZE
    data = [batches(num, seed=10 + rank, dtype=torch.float64) for rank, num in enumerate(num_of_ranks)]
    loop = PlainLoop()
    losses: list[list[float]] = [[], []]
    for first in range(0, max(num_of_ranks), ACCUMULATE):
        group = [(rank, batch) for rank in (0, 1) for batch in data[rank][first : first + ACCUMULATE]]
        loop.zero_grad()
        for rank, batch in group:
            loss, _ = loop.model(batch)
            (loss / len(group)).backward()
            losses[rank].append(float(loss.detach()))
        loop.step()
    for rank, end in enumerate(ends):
        assert end.value["losses"] == pytest.approx(losses[rank], rel=0, abs=1e-12)
        assert_close({name: torch.from_numpy(value) for name, value in end.value["state"].items()}, loop.state())
