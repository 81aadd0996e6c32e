"""Stages divided among their holders in real processes: the bits of replicated ones, what a rank keeps and sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bagpipe.dense.parallel.broadcast import HeldStage
from bagpipe.dense.parallel.stage_shards import StageShards
from bagpipe.dense.parallel.stage_sums import StageSums
from bagpipe.types.shard_level import ShardLevel
from tests.dense.parallel.test_sharded import OPTIMIZERS
from tests.distributed.processes import run_peers
from tests.distributed.threads import run_threads

#: Two replicas of two stages, and a stage of one rank. Layer 1 is in two stages.
HOLDERS = ((0, 2), (1, 3), (3,))
NUM_STEPS = 3


def make_stages() -> tuple[nn.Module, list[HeldStage]]:
    """A model and its stages; its weights are equal on all ranks."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    named = [*model.named_parameters()]
    return model, [
        HeldStage(holders=holders, parameters=tuple(own))
        for holders, own in zip(HOLDERS, (named[:3], named[3:6], named[6:]), strict=True)
    ]


def set_gradients(stage: HeldStage, rank: int, step: int) -> None:
    """Of very different magnitudes; the last parameter has none on some ranks, and none at all in step 1."""
    generator = torch.Generator().manual_seed(97 * rank + 7 * step)
    for place, (_, parameter) in enumerate(stage.parameters):
        if place == 2 and (rank > 1 or step == 1):
            continue
        scale = 10.0 ** torch.randint(-3, 4, parameter.shape, generator=generator)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def trained(peers: Any, name: str, level: ShardLevel, *, apart: bool = False) -> dict[str, Any]:
    """Parameters and optimizer state of the held stages, and bytes sent; `apart`: each has memory of its own."""
    model, stages = make_stages()
    groups = peers.open_stage_groups(HOLDERS)
    shares: Any = {}
    sums = None
    if level == "none":
        sums = StageSums(stages, groups, rank=peers.rank)
    else:
        shares = StageShards(model, stages, groups, rank=peers.rank, level=level)
        assert set(shares) == {number for number, stage in enumerate(stages[:2]) if peers.rank in stage.holders}
    found: dict[str, Any] = {}
    for number, stage in enumerate(stages):
        if peers.rank not in stage.holders:
            continue
        share = shares.get(number)
        segments = {} if share is None else share.segments
        if share is not None and apart:
            for tensor in (*segments.values(), *(parameter for _, parameter in stage.parameters)):
                tensor.data = tensor.data.clone()
            share.live_apart()
            for segment in segments.values():
                segment.data.fill_(torch.nan)
            share.adopt()
        optimizer = OPTIMIZERS[name]([segments.get(key, parameter) for key, parameter in stage.parameters])
        for step in range(NUM_STEPS):
            set_gradients(stage, peers.rank, step)
            if share is None:
                if sums is not None:
                    sums.reduce(number)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                continue
            share.reduce()
            kept = [parameter.grad is not None for _, parameter in stage.parameters]
            assert any(kept) == (level == "optimizer" and not apart), "gradients are freed when they are sent"
            optimizer.step()
            share.clear()
            if apart:
                share.copy_share()
            share.gather()
            assert share.is_gathered == apart
            if apart:
                share.arrive()
                assert not share.is_gathered
        states = dict(optimizer.state if share is None else share.whole_states(optimizer))
        for key, parameter in stage.parameters:
            found[key] = parameter.detach().numpy().tobytes()
            for state, value in states.get(parameter, {}).items():
                found[f"{key}.{state}"] = value.numpy().tobytes() if isinstance(value, torch.Tensor) else value
        if share is not None:
            elements = sum(shard.layout.share for shard in share.shards)
            flags = sum(len(shard.names) + 1 for shard in share.shards)
            assert share.num_sent_bytes == NUM_STEPS * 4 * (2 * elements + flags), "sums and gathers"
            assert set(share.pieces()) == set(share.segments) == {key for key, _ in stage.parameters}
    return found


def all_levels(peers: Any, names: list[str]) -> None:
    for name in names:
        expected = trained(peers, name, "none")
        assert expected
        for level in ("optimizer", "gradients"):
            for apart in (False, True):
                assert trained(peers, name, level, apart=apart) == expected, (name, level)  # type: ignore[arg-type]


def test_threads_end_with_the_bits_of_replicated_stages() -> None:
    ends = run_threads(4, all_levels, [*OPTIMIZERS])
    assert [end.error for end in ends] == [None] * 4


@pytest.mark.multiproc
def test_processes_end_with_the_bits_of_replicated_stages() -> None:
    ends = run_peers(4, all_levels, ["adam"])
    assert [end.error for end in ends] == [None] * 4


def checked(peers: Any) -> None:
    model, stages = make_stages()
    shares = StageShards(model, stages, peers.open_stage_groups(HOLDERS), rank=peers.rank, level="gradients")
    for number, share in shares.items():
        set_gradients(stages[number], peers.rank, 0)
        name, parameter = stages[number].parameters[0]
        if peers.rank < 2:
            assert parameter.grad is not None
            parameter.grad.view(-1)[0] = torch.inf  # in the share of one holder
        share.reduce()
        assert {key for key, value in share.checked() if not value.isfinite().all()} == {name}


def test_all_holders_see_that_a_gradient_is_not_finite() -> None:
    ends = run_threads(4, checked)
    assert [end.error for end in ends] == [None] * 4


def joins(peers: Any) -> dict[str, bool]:
    """Whole tensors of parts, of all parameters and of one; and sums of vectors in rank order."""
    model, stages = make_stages()
    steps = {
        number: group
        for number, stage in enumerate(stages)
        for group in peers.open_stage_groups([stage.holders], f"steps {number}").values()
    }
    shares = StageShards(
        model, stages, peers.open_stage_groups(HOLDERS), rank=peers.rank, level="optimizer", steps=steps
    )
    found = {}
    for number, share in shares.items():
        whole = {name: parameter.detach() * 2 for name, parameter in stages[number].parameters}
        parts = {name: segment.detach() * 2 for name, segment in share.segments.items()}
        joined = share.joined(parts)
        name = next(iter(whole))
        (one,) = share.joined({name: parts[name]}).items()
        found[f"{number} joined"] = joined.keys() == whole.keys() and all(
            torch.equal(joined[each], value) for each, value in whole.items()
        )
        found[f"{number} one"] = one[0] == name and torch.equal(one[1], whole[name])
        first, second = (0.1 * (rank + 1) for rank in stages[number].holders)
        total = share.add_up(torch.tensor([0.1 * (peers.rank + 1), 1.0], dtype=torch.float64))
        found[f"{number} sum"] = total.tolist() == [first + second, 2.0]
        assert share.joined({}) == {}
    return found


def test_parts_of_all_holders_are_joined() -> None:
    ends = run_threads(4, joins)
    assert [end.error for end in ends] == [None] * 4
    assert all(len(end.value) == 3 and all(end.value.values()) for end in ends)
