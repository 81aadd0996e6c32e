"""Pieces of a divided dense part: written by their owners, read back as the whole tensors."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from bagpipe.checkpoint.dense_pieces import Shares
from bagpipe.checkpoint.dense_state import MODEL, DenseState, OwnState, combine, load, load_of_rank, random_state
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.dense.parallel.shard_units import find_units
from bagpipe.dense.parallel.sharded import ShardedModel
from bagpipe.pipeline.stream import NullStreams
from bagpipe.testing.local_peers import LocalPeers, local_peers
from tests.checkpoint.samples import captured

NAME = f"{MODEL}0.weight"


def parts_of(model: nn.Module, cuts: list[int]) -> list[DenseState]:
    """States of ranks that have runs of the weight; rank 0 has the bias."""
    weight = model.get_parameter("0.weight").detach()
    states = []
    for rank, (first, end) in enumerate(itertools.pairwise(cuts)):
        piece = (Piece(first=first, shape=tuple(weight.shape)), weight.reshape(-1)[first:end])
        only = {"0.bias"} if rank == 0 else set()
        states.append(captured(model, only=only, own=OwnState(pieces={NAME: piece})))
    return states


def test_pieces_are_joined_in_any_order_and_through_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 3))
    whole = captured(model)
    states = parts_of(model, [0, 7, 8, 15])
    read = [load(tmp_path, state.save(tmp_path, rank)) for rank, state in enumerate(states)]
    for ranks in (states, read, read[::-1]):
        joined = combine(ranks)
        assert not joined.pieces
        assert joined.digest() == whole.digest()
    other = nn.Sequential(nn.Linear(5, 3))
    combine(read).restore(other)
    assert torch.equal(other.get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert len({state.digest() for state in states}) == 3


def test_a_missing_piece_is_an_error() -> None:
    first, _, last = parts_of(nn.Sequential(nn.Linear(5, 3)), [0, 7, 8, 15])
    with pytest.raises(BrokenCheckpoint, match=r"the checkpoint lacks elements of 'model.0.weight'"):
        combine([first, last])
    assert NAME not in combine([last]).tensors, "alone it stays a piece"


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_every_rank_reads_the_whole_of_what_ranks_have_divided(tmp_path: Path, rank: int) -> None:
    """Rank 2 of the job that wrote it had no element; a fourth rank is new."""
    model = nn.Sequential(nn.Linear(5, 3))
    states = [*parts_of(model, [0, 7, 15]), captured(model, only=set(), rng=random_state(torch.device("cpu")))]
    entries = [state.save(tmp_path, number) for number, state in enumerate(states)]
    found = load_of_rank(tmp_path, entries, rank, is_staged=False)
    assert found.digest() == captured(model).digest()


@pytest.mark.parametrize("rank", [0, 1])
def test_shares_that_end_with_a_tensor_are_joined_too(tmp_path: Path, rank: int) -> None:
    """Each rank's part then has whole tensors only, as a replica's has."""
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4.0)}
    entries = []
    for number, (name, tensor) in enumerate(tensors.items()):
        pieces = {f"{MODEL}{name}": (Piece(first=0, shape=tuple(tensor.shape)), tensor)}
        entries.append(combine([DenseState(tensors={}, pieces=pieces)]).save(tmp_path, number))
    found = load_of_rank(tmp_path, entries, rank, is_staged=False).below(MODEL)
    assert found.keys() == tensors.keys()


def test_a_replica_reads_its_own_file_alone(tmp_path: Path) -> None:
    models = [nn.Linear(5, 3), nn.Linear(5, 3)]
    entries = [captured(model).save(tmp_path, number) for number, model in enumerate(models)]
    (tmp_path / entries[0].name).unlink()
    assert load_of_rank(tmp_path, entries, 1, is_staged=False).digest() == captured(models[1]).digest()


class Odd(nn.Module):
    """A scalar, a parameter without elements, one of one element, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(3, 0))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3))

    def forward(self, values: Tensor) -> Tensor:
        return (values @ self.weight).sum() * self.scale + self.nothing.sum() + self.shift.sum()


def trained_share(peers: LocalPeers) -> DenseState:
    model = Odd()
    with ShardedModel(model, find_units(model), "gradients", sums=peers.dense, gathers=peers.plans) as shards:
        optimizer = Adam([shards.segments[name] for name, _ in model.named_parameters()])
        for _ in range(2):
            with shards.forward():
                loss = model(torch.ones(2, 5))
            with shards.backward():
                loss.backward()  # type: ignore[no-untyped-call]
            assert all(torch.isfinite(largest) for _, largest in shards.largest_gradients())
            shards.reduce()
            optimizer.step()
            shards.gather()
            shards.clear()
        return Shares(model, optimizer, shards, is_first=peers.rank == 0).capture(NullStreams()).get()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parameters_of_every_size_are_written_and_read_back(num_ranks: int) -> None:
    with ThreadPoolExecutor(num_ranks) as threads:
        found = combine([*threads.map(trained_share, local_peers(num_ranks))])
    assert not found.pieces
    model = Odd()
    optimizer = Adam(model.parameters())
    for _ in range(2):
        (model(torch.ones(2, 5)) * num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found.digest() == captured(model, optimizer).digest()
    other = Odd()
    found.restore(other, Adam(other.parameters()))
    assert captured(other).digest() == captured(model).digest()
