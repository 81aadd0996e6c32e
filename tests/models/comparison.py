"""Compares a model with a reference: outputs, and one step of gradient descent, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["Bags", "assert_same_step", "click_batch"]


class Bags(nn.Module):
    """Summed bags in float64, one table for each feature, called like torchrec's collection.

    Args:
        dims: feature -> dimension of its table, which has 7 rows.
    """

    def __init__(self, dims: dict[str, int]) -> None:
        super().__init__()
        self.names = list(dims)
        self.tables = nn.ModuleList(nn.EmbeddingBag(7, dim, mode="sum", dtype=torch.float64) for dim in dims.values())

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        bags = features.to_dict()
        vectors = [
            table(bags[name].values(), bags[name].offsets()[:-1])
            for name, table in zip(self.names, self.tables, strict=True)
        ]
        widths = [vector.shape[1] for vector in vectors]
        return KeyedTensor(keys=self.names, length_per_key=widths, values=torch.cat(vectors, dim=1))

    def embedding_bag_configs(self) -> list[Any]:
        return [
            SimpleNamespace(embedding_dim=table.embedding_dim, feature_names=[name])
            for name, table in zip(self.names, self.tables, strict=True)
        ]


def click_batch(names: Sequence[str], num_dense: int, *, num_examples: int = 6) -> tuple[Tensor, Any, Tensor]:
    """Dense columns, bags of up to three ids, and labels."""
    draw = torch.Generator().manual_seed(11)
    lengths = torch.randint(0, 4, (len(names) * num_examples,), generator=draw)
    ids = torch.randint(0, 7, (int(lengths.sum()),), generator=draw)
    dense = torch.randn(num_examples, num_dense, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 2, (num_examples,), generator=draw).double()
    return dense, KeyedJaggedTensor(keys=list(names), values=ids, lengths=lengths), labels


def assert_same_step(model: nn.Module, plain: nn.Module, loss_of: Callable[[nn.Module], Tensor]) -> None:
    """Assert that losses are equal before and after a step from equal random values, and all parameters after it.

    Args:
        model, plain: with parameters of the same names.
        loss_of: called with either.
    """
    model.double(), plain.double()
    names = dict(model.named_parameters())
    assert {name: value.shape for name, value in plain.named_parameters()} == {
        name: value.shape for name, value in names.items()
    }
    draw = torch.Generator().manual_seed(5)
    for name, value in plain.named_parameters():
        value.data.copy_(torch.randn(value.shape, generator=draw, dtype=torch.float64) / 2)
        names[name].data.copy_(value.data)
    losses = {}
    for key, module in (("model", model), ("plain", plain)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        before = loss_of(module)
        before.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses[key] = torch.stack([before.detach(), loss_of(module).detach()])
    torch.testing.assert_close(losses["model"], losses["plain"], rtol=1e-12, atol=1e-12)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(names[name], value, rtol=1e-12, atol=1e-12, msg=name)
