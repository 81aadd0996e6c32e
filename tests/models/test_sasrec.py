"""`SASRec` against its formula, position by position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagpipe.models.sasrec import SASRec
from tests.models.comparison import assert_same_step
from tests.models.sequences import Vectors, jagged

FEATURES = {"sequence": 0, "positive": 0, "negative": 0}
BAGS = {
    "sequence": [[1, 2, 1], [5], [0, 3, 4, 5]],
    "positive": [[2, 1, 3], [6], [3, 4, 5, 8]],
    "negative": [[7, 7, 0], [2], [1, 2, 1, 6]],
}
DIM, LONGEST = 4, 5


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Dropout(0), nn.Linear(DIM, DIM))


def normed(x: Tensor, norm: Any) -> Tensor:
    centred = x - x.mean()
    return centred / torch.sqrt((centred**2).mean() + 1e-5) * norm.weight + norm.bias


class PlainSASRec(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.items = Vectors(FEATURES, DIM)
        self.positions = nn.Parameter(torch.zeros(LONGEST, DIM))
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)

    def attended(self, block: Any, states: list[Tensor], place: int) -> Tensor:
        """What the position reads of itself and the ones before."""
        heads = []
        query = block.query.weight @ normed(states[place], block.attention_norm)
        for part in torch.arange(DIM).chunk(self.num_heads):
            scores = [
                query[part] @ (block.key.weight @ state)[part] / math.sqrt(len(part)) for state in states[: place + 1]
            ]
            shares = torch.exp(torch.stack(scores)) / sum(torch.exp(score) for score in scores)
            values = [(block.value.weight @ state)[part] for state in states]
            heads.append(sum(share * value for share, value in zip(shares, values, strict=False)))
        return torch.cat(heads)

    def forward(self, batch: object) -> Tensor:
        losses: list[Tensor] = []
        blocks: Any = self.blocks
        for number, ids in enumerate(BAGS["sequence"]):
            states = [
                row + position for row, position in zip(self.items.of("sequence", ids), self.positions, strict=False)
            ]
            for block in blocks:
                states = [state + self.attended(block, states, place) for place, state in enumerate(states)]
                states = [state + block.mlp(normed(state, block.mlp_norm)) for state in states]
            for place, state in enumerate(states):
                final = normed(state, self.norm)
                (positive,) = self.items.of("positive", [BAGS["positive"][number][place]])
                (negative,) = self.items.of("negative", [BAGS["negative"][number][place]])
                losses.append(torch.log(1 + torch.exp(-final @ positive)) + torch.log(1 + torch.exp(final @ negative)))
        return torch.stack(losses).mean()


@pytest.mark.parametrize("num_heads", [1, 2])
def test_it_equals_the_formula(num_heads: int) -> None:
    model = SASRec(Vectors(FEATURES, DIM), dim=DIM, max_length=LONGEST, num_heads=num_heads)
    batch = jagged(BAGS)
    assert_same_step(
        model, PlainSASRec(num_heads), lambda module: module(batch)[0] if module is model else module(batch)
    )


def test_dropout_is_of_training_alone() -> None:
    model = SASRec(Vectors(FEATURES, DIM), dim=DIM, max_length=LONGEST, dropout=0.5).double()
    batch = jagged(BAGS)
    assert not torch.equal(model(batch)[0], model(batch)[0])
    model.eval()
    assert torch.equal(model(batch)[0], model(batch)[0])
    assert model(batch)[1].shape == (8,)
