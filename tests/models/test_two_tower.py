"""`TwoTower` against its formula, pair by pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagpipe.models.two_tower import TwoTower, TwoTowerBatch
from tests.models.comparison import Bags, assert_same_step, click_batch
from tests.models.plain_fuxictr import layers, width_of
from tests.models.sequences import jagged

USER, ITEM = {"user": 3, "history": 2}, {"item": 3, "tags": 2}
ITEM_IDS = [2, 4, 2, 0, 4, 4]


class PlainTower(nn.Module):
    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags
        self.mlp = layers([width_of(bags), 5], outputs=4)

    def forward(self, features: Any) -> Tensor:
        vectors: Tensor = self.mlp(self.bags(features).values())
        return torch.stack([vector / torch.sqrt((vector**2).sum()) for vector in vectors])


class PlainTwoTower(nn.Module):
    def __init__(self, skips_equal: bool) -> None:
        super().__init__()
        self.user, self.item = PlainTower(Bags(USER)), PlainTower(Bags(ITEM))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.skips_equal = skips_equal

    def forward(self, batch: TwoTowerBatch) -> Tensor:
        users, items = self.user(batch.user), self.item(batch.item)
        losses = []
        for number, user in enumerate(users):
            scores = {
                other: torch.exp(self.log_scale) * (user @ items[other]) - batch.log_q[other]
                for other in range(len(items))
                if other == number or not self.skips_equal or ITEM_IDS[other] != ITEM_IDS[number]
            }
            losses.append(torch.log(sum(torch.exp(score) for score in scores.values())) - scores[number])
        return torch.stack(losses).mean()


def batch_of() -> TwoTowerBatch:
    _, user, _ = click_batch(list(USER), 0)
    item = jagged({"item": [[number] for number in ITEM_IDS], "tags": [[1, 2], [], [3], [4], [5, 6], [0]]})
    return TwoTowerBatch(user=user, item=item, log_q=torch.arange(6).double() / 7 - 3)


@pytest.mark.parametrize("item_id", ["", "item"])
def test_it_equals_the_formula(item_id: str) -> None:
    model = TwoTower(Bags(USER), Bags(ITEM), dim=4, hidden=(5,), item_id=item_id)
    batch = batch_of()
    assert_same_step(
        model, PlainTwoTower(bool(item_id)), lambda module: module(batch)[0] if module is model else module(batch)
    )


def test_vectors_have_length_1() -> None:
    _, outputs = TwoTower(Bags(USER), Bags(ITEM), dim=4, scale=20.0).double()(batch_of().to(torch.device("cpu")))
    for vectors in outputs:
        torch.testing.assert_close(vectors.square().sum(1), torch.ones(6).double())
