"""Pieces of a divided dense part: written by their owners, read back as the whole tensors."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from bagpipe.checkpoint.dense_state import MODEL, DenseState, OwnState, combine, load
from bagpipe.checkpoint.manifest import BrokenCheckpoint
from bagpipe.dense.parallel.shard_layout import Piece
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
