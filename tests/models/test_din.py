"""`DIN` against its formula, example by example."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.models.din import DIN
from tests.models.comparison import assert_same_step
from tests.models.sequences import Vectors, jagged

FEATURES = {"target": 0, "history": 0, "user": 1, "place": 1}
BAGS = {
    "target": [[1], [2], [1]],
    "history": [[3, 1, 3], [], [2]],
    "user": [[0], [4], [0]],
    "place": [[7], [4], [8]],
}
LABELS = torch.tensor([1.0, 0.0, 0.0]).double()
DIM = 4


class PlainDIN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Vectors(FEATURES, DIM)
        self.attention = nn.Sequential(nn.Linear(4 * DIM, 5), nn.PReLU(), nn.Linear(5, 1))
        self.top = nn.Sequential(nn.Linear(4 * DIM, 6), nn.PReLU(), nn.Linear(6, 3), nn.PReLU(), nn.Linear(3, 1))

    def run(self, layers: Any, x: Tensor) -> Tensor:
        for layer in layers:
            linear = isinstance(layer, nn.Linear)
            x = layer.weight @ x + layer.bias if linear else torch.where(x > 0, x, layer.weight * x)
        return x

    def forward(self, batch: object) -> Tensor:
        losses = []
        for number, label in enumerate(LABELS):
            rows = {name: self.embeddings.of(name, bags[number]) for name, bags in BAGS.items()}
            (target,) = rows["target"]
            interest = torch.zeros(DIM).double()
            for item in rows["history"]:
                pair = torch.cat([item, target, item - target, item * target])
                interest = interest + self.run(self.attention, pair) * item
            logit = self.run(self.top, torch.cat([interest, target, *rows["user"], *rows["place"]]))
            losses.append(torch.log(1 + torch.exp(-logit if label else logit)))
        return torch.cat(losses).mean()


def test_it_equals_the_formula() -> None:
    """Repeated items, an empty history, and a table that two features read."""
    batch = jagged(BAGS), LABELS
    model = DIN(Vectors(FEATURES, DIM), dim=DIM, others=["user", "place"], attention_mlp=(5,), top_mlp=(6, 3))
    assert_same_step(model, PlainDIN(), lambda module: module(batch)[0] if module is model else module(batch))


def test_batches_without_any_history() -> None:
    bags = {**BAGS, "history": [[], [], []]}
    loss, chances = DIN(Vectors(FEATURES, DIM), dim=DIM).double()((jagged(bags), LABELS))
    loss.backward()
    assert chances.shape == (3,)
