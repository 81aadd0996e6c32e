"""A plain torch loop over the small model, with torch's optimizers for dense parameters and tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.train_pipeline.small import FEATURES, RATE, Plain

__all__ = ["PlainLoop", "assert_close"]


class PlainLoop:
    """The model in plain torch, and its optimizers.

    Args:
        model: default: `Plain` in float64.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Any = Plain().double() if model is None else model
        self.dense = torch.optim.Adam(self.model.over.parameters(), lr=0.01)
        self.rows = torch.optim.Adagrad(self.model.tables.parameters(), lr=RATE)

    def zero_grad(self) -> None:
        self.dense.zero_grad()
        self.rows.zero_grad()

    def step(self) -> None:
        self.dense.step()
        self.rows.step()

    def state(self) -> dict[str, Tensor]:
        """Rows of all tables and dense parameters, by the names of the small model."""
        rows = {f"t_{name}": self.model.tables[name].weight.detach() for name in FEATURES}
        return {**rows, **{f"over.{name}": value.detach() for name, value in self.model.over.named_parameters()}}


def assert_close(ours: dict[str, Tensor], plain: dict[str, Tensor], atol: float = 1e-12) -> None:
    """Equal up to an absolute difference."""
    assert ours.keys() == plain.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
