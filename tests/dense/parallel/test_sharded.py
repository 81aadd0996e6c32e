"""`ShardedModel` in real processes: the bits of a replicated model on every level, and what it keeps and sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagpipe.dense.lamb import Lamb
from bagpipe.dense.parallel.replicated import DenseParallel
from bagpipe.dense.parallel.shard_layout import kept_bytes, sent_bytes
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.distributed.interface import RankGroup
from bagpipe.distributed.process_groups import TorchPeers
from bagpipe.types.shard_level import ShardLevel
from tests.dense.parallel.test_replicated import NUM_EXAMPLES, batch, make_model, mine_of
from tests.distributed.processes import run_peers

pytestmark = pytest.mark.multiproc

LEVELS: tuple[ShardLevel, ...] = ("optimizer", "gradients", "parameters")
STEPS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.02),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, eps=1e-8),
}
#: Follows norms of whole tensors, which are sums over shares.
LAMB: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": lambda parameters: Lamb(parameters, lr=0.05, weight_decay=0.01)
}


def gathers_of(peers: TorchPeers) -> RankGroup:
    """A second communicator of all ranks."""
    (group,) = peers.open_stage_groups([range(peers.world_size)]).values()
    return group


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return loss / NUM_EXAMPLES


def replicated(peers: TorchPeers, dtype: torch.dtype, empty_rank: int, name: str) -> dict[str, bytes]:
    model = make_model(7 + peers.rank, dtype)
    optimizer = {**OPTIMIZERS, **LAMB}[name](model.parameters())
    with DenseParallel(model, peers.dense) as parallel:
        for step in range(STEPS):
            model.turn = step
            dense, labels = (part[mine_of(peers, empty_rank)] for part in batch(step, dtype))
            if len(labels):
                loss_of(model(dense, None), labels).backward()  # type: ignore[no-untyped-call]
            parallel.reduce()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    named = dict(model.named_parameters())
    ends = {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
    for parameter_name, parameter in named.items():
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                ends[f"{parameter_name}.{state}"] = value.numpy().tobytes()
    return ends


def sharded(
    peers: TorchPeers, gathers: RankGroup, dtype: torch.dtype, empty_rank: int, name: str, level: ShardLevel
) -> dict[str, bytes]:
    """The same job; state is joined from the ranks' segments."""
    model = make_model(7 + peers.rank, dtype)
    shards = ShardedModel(model, find_units(model), level, sums=peers.dense, gathers=gathers)
    with shards:
        segments = [shards.segments.get(name, parameter) for name, parameter in model.named_parameters()]
        optimizer = {**OPTIMIZERS, **LAMB}[name](segments)
        if isinstance(optimizer, Lamb):
            optimizer.add_up = shards.add_up
        shards.release_model()
        for step in range(STEPS):
            model.turn = step
            dense, labels = (part[mine_of(peers, empty_rank)] for part in batch(step, dtype))
            loss = None
            with shards.forward():
                if len(labels):
                    loss = loss_of(model(dense, None), labels)
            with shards.backward():
                if loss is not None:
                    loss.backward()  # type: ignore[no-untyped-call]
            shards.reduce()
            optimizer.step()
            shards.gather()
            shards.clear()
        assert shards.is_whole is (level != "parameters")
        shards.gather_model()
        assert shards.is_whole
        ends = {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
        states = {
            (parameter_name, state): value
            for parameter_name, segment in zip(dict(model.named_parameters()), segments, strict=True)
            for state, value in optimizer.state.get(segment, {}).items()
            if isinstance(value, Tensor)
        }
        mine = {f"{key[0]}.{key[1]}": value.numpy().tobytes().hex() for key, value in states.items()}
        everyone = peers.gather(mine)
        for key, value in states.items():
            text = f"{key[0]}.{key[1]}"
            parts = everyone[:1] if value.ndim == 0 or key[0] not in shards.segments else everyone
            ends[text] = b"".join(bytes.fromhex(part[text]) for part in parts)
    return ends


def train_all(peers: TorchPeers, dtype: torch.dtype, empty_rank: int, optimizers: list[str]) -> list[str]:
    """Names of what differs from the replicated job."""
    gathers = gathers_of(peers)
    differing = []
    for name in optimizers:
        expected = replicated(peers, dtype, empty_rank, name)
        for level in LEVELS:
            found = sharded(peers, gathers, dtype, empty_rank, name, level)
            assert found.keys() == expected.keys()
            differing += [f"{name} {level} {key}" for key in expected if found[key] != expected[key]]
    return differing


@pytest.mark.parametrize(
    ("world_size", "empty_rank", "dtype", "optimizers"),
    [
        (2, 1, torch.float32, ["momentum", "adam", "adagrad"]),
        (4, -1, torch.float64, ["adamw"]),
        pytest.param(2, -1, torch.float64, [*OPTIMIZERS], marks=pytest.mark.slow),
        pytest.param(3, -1, torch.float32, [*OPTIMIZERS], marks=pytest.mark.slow),
        pytest.param(4, 0, torch.float32, [*OPTIMIZERS], marks=pytest.mark.slow),
    ],
)
def test_bits_are_those_of_the_replicated_model(
    world_size: int, empty_rank: int, dtype: torch.dtype, optimizers: list[str]
) -> None:
    ends = run_peers(world_size, train_all, dtype, empty_rank, optimizers)
    assert [end.error for end in ends] == [None] * world_size
    assert [end.value for end in ends] == [[]] * world_size


class Wide(nn.Module):
    """Layers large enough that padding does not count, and one with an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(120, 120) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages of tensors."""
    storages = {tensor.untyped_storage() for tensor in tensors if tensor is not None}
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def measure(peers: TorchPeers) -> dict[str, tuple[int, int, int, int]]:
    """By level: bytes kept of parameters, gradients and state at the step; bytes sent in it."""
    gathers, found = gathers_of(peers), {}
    for level in LEVELS:
        model = Wide()
        shards = ShardedModel(model, find_units(model), level, sums=peers.dense, gathers=gathers)
        with shards:
            segments = [*shards.segments.values()]
            optimizer = torch.optim.Adam(segments)
            shards.release_model()
            for _ in range(2):
                before = shards.num_sent_bytes
                with shards.forward():
                    loss = model(torch.ones(3, 120)).sum()
                with shards.backward():
                    loss.backward()
                is_bad = shards.reduce(is_bad=peers.rank == 1)
                assert is_bad, "every rank hears of one rank's bad batch"
                optimizer.step()
                kept = (
                    bytes_of([*model.parameters(), *segments]),
                    bytes_of([p.grad for p in (*model.parameters(), *segments)]),
                    bytes_of(v for state in optimizer.state.values() for v in state.values() if v.ndim),
                )
                shards.gather()
                shards.clear()
            found[level] = (*kept, shards.num_sent_bytes - before)
    return found


def test_a_rank_keeps_and_sends_what_the_formulas_say() -> None:
    (first, second) = run_peers(2, measure)
    assert (first.error, second.error) == (None, None)
    elements = sum(parameter.numel() for parameter in Wide().parameters())
    for level in LEVELS:
        expected = kept_bytes(level, elements, 2, itemsize=4, states=2)
        parameters, gradients, state, sent = first.value[level]
        assert parameters == pytest.approx(expected.parameters, rel=0.01)
        assert gradients == pytest.approx(expected.gradients, rel=0.01)
        assert state == pytest.approx(expected.state, rel=0.01)
        assert sent == pytest.approx(sent_bytes(level, elements, 2, itemsize=4), rel=0.01)


def lamb_differs(peers: TorchPeers, empty_rank: int) -> float:
    """Largest difference from the replicated job, on any level. Levels have equal bits."""
    gathers = gathers_of(peers)
    expected = replicated(peers, torch.float64, empty_rank, "lamb")
    found = [sharded(peers, gathers, torch.float64, empty_rank, "lamb", level) for level in LEVELS]
    assert found[0] == found[1] == found[2]
    return max(_off(found[0][name], value, name) for name, value in expected.items())


def _off(ours: bytes, theirs: bytes, name: str) -> float:
    dtype = np.float32 if name.endswith(".step") else np.float64
    return float(np.abs(np.frombuffer(ours, dtype) - np.frombuffer(theirs, dtype)).max(initial=0.0))


@pytest.mark.parametrize(("world_size", "empty_rank"), [(2, 1), pytest.param(4, -1, marks=pytest.mark.slow)])
def test_lamb_adds_up_the_squares_of_shares(world_size: int, empty_rank: int) -> None:
    ends = run_peers(world_size, lamb_differs, empty_rank)
    assert [end.error for end in ends] == [None] * world_size
    assert max(end.value for end in ends) <= 1e-12
