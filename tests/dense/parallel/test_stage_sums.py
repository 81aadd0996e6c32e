"""Gradient sums over the holders of stages: in holder order, with equal bits in threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.errors import InputError
from tests.distributed.processes import Ended, run_peers
from tests.distributed.threads import run_threads

NUM_STEPS = 2
SHAPES = ((3, 5), (7,), (2, 2))

#: Holders by stage: two replicas of two ranks, the same in two directions, and stages of one rank.
MESHES = {
    "replicas": (4, [(0, 2), (1, 3)]),
    "two directions": (4, [(1, 0, 3, 2), (0, 1, 2, 3)]),
    "uneven": (3, [(2, 0), (1,), (0, 2), (2, 1, 0)]),
}


def make_stages(holders: list[tuple[int, ...]]) -> list[HeldStage]:
    """Parameters of two dtypes; the last of each stage is frozen."""
    stages = []
    for number, ranks in enumerate(holders):
        parameters = [
            (f"{number}.{place}", nn.Parameter(torch.zeros(shape, dtype=(torch.float32, torch.float64)[place % 2])))
            for place, shape in enumerate(SHAPES)
        ]
        parameters.append((f"{number}.frozen", nn.Parameter(torch.zeros(3), requires_grad=False)))
        stages.append(HeldStage(holders=ranks, parameters=tuple(parameters)))
    return stages


def gradient(rank: int, step: int, name: str, like: torch.Tensor) -> torch.Tensor | None:
    """Gradients of very different magnitudes, so that the order of a sum shows; the second one only on rank 0, once."""
    place = name.partition(".")[2]
    if not like.requires_grad or (place == "1" and (rank or step)):
        return None
    generator = torch.Generator().manual_seed(97 * rank + 7 * step)
    scale = 10.0 ** torch.randint(-3, 4, like.shape, generator=generator)
    return (torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale).to(like.dtype)


def sum_all(peers: Any, holders: list[tuple[int, ...]], bucket_bytes: int) -> list[Any]:
    """Gradients of the held stages after their sum, step by step."""
    stages = make_stages(holders)
    groups = peers.open_stage_groups([stage.holders for stage in stages])
    assert set(groups) == {tuple(sorted(ranks)) for ranks in holders if len(ranks) > 1 and peers.rank in ranks}
    sums = StageSums(stages, groups, rank=peers.rank, bucket_bytes=bucket_bytes)
    story = []
    for step in range(NUM_STEPS):
        found = {}
        for number, stage in enumerate(stages):
            if peers.rank not in stage.holders:
                continue
            for name, parameter in stage.parameters:
                parameter.grad = gradient(peers.rank, step, name, parameter)
            sums.reduce(number)
            for name, parameter in stage.parameters:
                found[name] = None if parameter.grad is None else parameter.grad.numpy().tobytes()
        story.append(found)
    return story


def expected(holders: list[tuple[int, ...]], rank: int) -> list[Any]:
    """The same sums, computed in this process."""
    story = []
    for step in range(NUM_STEPS):
        found: dict[str, bytes | None] = {}
        for stage in make_stages(holders):
            for name, parameter in stage.parameters if rank in stage.holders else ():
                parts = [gradient(other, step, name, parameter) for other in stage.holders]
                total = None
                for part in parts:
                    if any(other is not None for other in parts):
                        part = torch.zeros_like(parameter) if part is None else part
                        total = part if total is None else total + part
                found[name] = None if total is None else total.detach().numpy().tobytes()
        story.append(found)
    return story


@pytest.mark.multiproc
@pytest.mark.parametrize("run", [run_peers, run_threads])
@pytest.mark.parametrize("mesh", MESHES)
def test_sums_are_made_in_the_holders_order(run: Callable[..., list[Ended]], mesh: str) -> None:
    world_size, holders = MESHES[mesh]
    for bucket_bytes in (1 << 20,) if run is run_peers else (1, 100, 1 << 20):
        for rank, end in enumerate(run(world_size, sum_all, holders, bucket_bytes)):
            assert end.error is None
            assert end.value == expected(holders, rank)


def sum_of_some(peers: Any, givers: list[list[int]]) -> list[Any]:
    """One stage of all ranks, whose gradients only the givers of a step have."""
    (stage,) = make_stages([tuple(range(peers.world_size))])
    groups = peers.open_stage_groups([stage.holders])
    sums = StageSums([stage], groups, rank=peers.rank)
    story = []
    for some in givers:
        for name, parameter in stage.parameters:
            parameter.grad = gradient(peers.rank, 0, name, parameter) if peers.rank in some else None
        sums.reduce(0, some)
        story.append([None if p.grad is None else p.grad.numpy().tobytes() for _, p in stage.parameters])
    return story


@pytest.mark.multiproc
@pytest.mark.parametrize("run", [run_peers, run_threads])
def test_ranks_without_gradients_send_none(run: Callable[..., list[Ended]]) -> None:
    """The sum is that of the givers, in the holders' order, on all ranks; without givers there is none."""
    givers = [[1], [0, 2], [], [2, 1, 0]]
    (stage,) = make_stages([(0, 1, 2)])
    expected_story = []
    for some in givers:
        found: list[bytes | None] = []
        for name, parameter in stage.parameters:
            parts = [part for rank in sorted(some) if (part := gradient(rank, 0, name, parameter)) is not None]
            total = None
            for part in parts:
                total = part if total is None else total + part
            found.append(None if total is None else total.detach().numpy().tobytes())
        expected_story.append(found)
    for end in run(3, sum_of_some, givers):
        assert end.error is None
        assert end.value == expected_story


def test_a_parameter_of_two_stages_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    stages = [HeldStage(holders=(0,), parameters=(("top.weight", parameter),))] * 2
    with pytest.raises(InputError, match=r"model parameter top.weight is used by stages 0 and 1"):
        StageSums(stages, {}, rank=0)


def sparse(peers: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    stages = [HeldStage(holders=(0, 1), parameters=(("table.weight", table.weight),))]
    table(torch.arange(2)).sum().backward()
    StageSums(stages, peers.open_stage_groups([(0, 1)]), rank=peers.rank).reduce(0)


def test_a_sparse_gradient_is_refused() -> None:
    for end in run_threads(2, sparse):
        assert end.error is not None
        assert end.error[1].startswith("model parameter table.weight: expected a dense gradient")
