"""References of the models from FuxiCTR: the papers' formulas, field by field and pair by pair, over any bags.

Parameters have the names of `bagpipe.models`, so that values can be copied; nothing else is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["PlainDCNv2", "PlainDeepFM", "PlainFinalMLP", "PlainGate"]


class Vectors(nn.Module):
    """One vector for each dense column."""

    def __init__(self, num_columns: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_columns, dim))

    def fields(self, dense: Tensor) -> list[Tensor]:
        return [dense[:, [number]] * vector[None] for number, vector in enumerate(self.weight)]


class Norm(nn.Module):
    """Batch norm by its formula: biased variance, eps 1e-5."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.sum(0) / len(x)
        variance = ((x - mean) ** 2).sum(0) / len(x)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Rectifier(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, 0)


def layers(widths: Sequence[int], *, norm: bool = False, outputs: int = 0) -> nn.Sequential:
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), *([Norm(after)] if norm else []), Rectifier()]
    return nn.Sequential(*parts, *([nn.Linear(widths[-1], outputs)] if outputs else []))


def width_of(bags: Any) -> int:
    return sum(config.embedding_dim for config in bags.embedding_bag_configs() for _ in config.feature_names)


class PlainDCNv2(nn.Module):
    def __init__(
        self,
        bags: Any,
        num_dense: int,
        dim: int,
        hidden: Sequence[int],
        *,
        num_layers: int = 3,
        stacked: bool = False,
        norm: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings, self.stacked = bags, stacked
        if num_dense:
            self.numeric = Vectors(num_dense, dim)
        width = num_dense * dim + width_of(bags)
        self.cross = nn.Module()
        self.cross.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))
        self.deep = layers([width, *hidden], norm=norm)
        self.head = nn.Linear(hidden[-1] + (0 if stacked else width), 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        fields = [*(self.numeric.fields(dense) if hasattr(self, "numeric") else []), self.embeddings(sparse).values()]
        start = torch.cat(fields, dim=1)
        x = start
        for layer in self.cross.layers:  # type: ignore[union-attr] # a list of linear layers
            x = torch.stack(
                [row0 * (layer.weight @ row + layer.bias) + row for row0, row in zip(start, x, strict=True)]
            )
        logits: Tensor = self.head(self.deep(x)) if self.stacked else self.head(torch.cat([x, self.deep(start)], dim=1))
        return logits


class PlainDeepFM(nn.Module):
    def __init__(self, bags: Any, num_dense: int, dim: int, hidden: Sequence[int], *, norm: bool = False) -> None:
        super().__init__()
        self.embeddings, self.dim = bags, dim
        if num_dense:
            self.numeric, self.numeric_first = Vectors(num_dense, dim), Vectors(num_dense, 1)
        self.bias = nn.Parameter(torch.zeros(1))
        num_fields = num_dense + width_of(bags) // (dim + 1)
        self.deep = layers([num_fields * dim, *hidden], norm=norm, outputs=1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        rows = torch.split(self.embeddings(sparse).values(), self.dim + 1, dim=1)
        first, fields = [row[:, :1] for row in rows], [row[:, 1:] for row in rows]
        if hasattr(self, "numeric"):
            first += self.numeric_first.fields(dense)
            fields = [*self.numeric.fields(dense), *fields]
        pairs = [(one * other).sum(1, keepdim=True) for one, other in combinations(fields, 2)]
        logits: Tensor = self.bias + sum(first) + sum(pairs) + self.deep(torch.cat(fields, dim=1))
        return logits


class PlainGate(nn.Module):
    def __init__(self, bags: Any, columns: Sequence[int], *, dim: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.chosen = list(columns)
        if bags is not None:
            self.embeddings = bags
        if columns:
            self.numeric = Vectors(len(columns), dim)
        width = len(columns) * dim + (0 if bags is None else width_of(bags))
        if not width:
            self.constant = nn.Parameter(torch.zeros(dim))
        self.factors = layers([width or dim, *hidden], outputs=outputs)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        parts = [torch.stack([self.constant] * len(dense))] if hasattr(self, "constant") else []
        if hasattr(self, "numeric"):
            parts += self.numeric.fields(dense[:, self.chosen])
        if hasattr(self, "embeddings"):
            parts.append(self.embeddings(sparse).values())
        return 2 / (1 + torch.exp(-self.factors(torch.cat(parts, dim=1))))


class PlainFinalMLP(nn.Module):
    def __init__(
        self,
        bags: Any,
        num_dense: int,
        dim: int,
        hidden: tuple[Sequence[int], Sequence[int]],
        *,
        heads: int = 1,
        norm: bool = False,
        gates: Sequence[PlainGate] = (),
    ) -> None:
        super().__init__()
        self.embeddings = bags
        if num_dense:
            self.numeric = Vectors(num_dense, dim)
        width = num_dense * dim + width_of(bags)
        if gates:
            self.gates = nn.ModuleList(gates)
        self.streams = nn.ModuleList(layers([width, *widths], norm=norm) for widths in hidden)
        first, second = hidden[0][-1], hidden[1][-1]
        self.fusion = nn.Module()
        self.fusion.weight = nn.Parameter(torch.zeros(heads, first // heads, second // heads))
        self.fusion.first, self.fusion.second = nn.Linear(first, 1), nn.Linear(second, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        fields = [*(self.numeric.fields(dense) if hasattr(self, "numeric") else []), self.embeddings(sparse).values()]
        x = torch.cat(fields, dim=1)
        gated = [x * gate(dense, sparse) for gate in self.gates] if hasattr(self, "gates") else [x, x]
        one, other = (stream(part) for stream, part in zip(self.streams, gated, strict=True))
        fusion: Any = self.fusion
        logits: Tensor = fusion.first(one) + fusion.second(other)
        heads = len(fusion.weight)
        pieces = zip(one.chunk(heads, dim=1), other.chunk(heads, dim=1), fusion.weight, strict=True)
        for left, right, weight in pieces:
            logits = logits + torch.stack([(a @ weight @ b).reshape(1) for a, b in zip(left, right, strict=True)])
        return logits
