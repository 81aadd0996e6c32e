"""Models of any collections with their batches, and the same models in plain torch, float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)

from bagpipe.kernels.initialization import initial_weights
from bagpipe.optim import Frozen, RowOptimizer, RowWiseAdagrad
from bagpipe.types.schema import RowTable

__all__ = ["AnyModel", "CollectionSpec", "PlainModel", "PlainRows", "TableSpec", "batches_of"]

UNUSED = "unused"


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """One table."""

    name: str
    dim: int
    rows: int
    features: tuple[str, ...]
    pooling: PoolingType = PoolingType.SUM
    optimizer: RowOptimizer


@dataclass(frozen=True, kw_only=True)
class CollectionSpec:
    """One collection. `key` names its KeyedJaggedTensor in a batch; `examples` is the number of its examples."""

    kind: str  # bags, weighted or sequences
    tables: tuple[TableSpec, ...]
    key: str
    examples: int
    calls: int = 1

    @property
    def features(self) -> list[str]:
        return list(dict.fromkeys(name for table in self.tables for name in table.features))

    @property
    def width(self) -> int:
        return sum(table.dim * len(table.features) for table in self.tables)


class Scores(nn.Module):
    """A loss over each collection's vectors; subclasses look these up."""

    def __init__(self, specs: Sequence[CollectionSpec]) -> None:
        super().__init__()
        self.specs = tuple(specs)
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(spec.width, 1) for spec in specs)
        self.weight_scale = nn.Parameter(torch.tensor(1.5))
        self.double()

    def look_up(self, number: int, ids: KeyedJaggedTensor) -> Tensor:
        raise NotImplementedError

    def forward(self, batch: Mapping[str, KeyedJaggedTensor]) -> tuple[Tensor, Tensor]:
        losses = []
        for number, (spec, layer) in enumerate(zip(self.specs, self.layers, strict=True)):
            ids = batch[spec.key]
            if spec.kind == "weighted":
                # The gradient of the weights reaches `weight_scale`.
                weights = ids.weights() * self.weight_scale
                ids = KeyedJaggedTensor(
                    keys=ids.keys(), values=ids.values(), lengths=ids.lengths(), weights=weights, stride=ids.stride()
                )
            vectors = sum(self.look_up(number, ids) * (call + 1) for call in range(spec.calls))
            losses.append((layer(vectors).squeeze(-1) - 0.5).square().mean())
        loss = torch.stack(losses).sum()
        return loss, loss.detach()


class AnyModel(Scores):
    """With torchrec's collections."""

    def __init__(self, specs: Sequence[CollectionSpec], device: str = "meta") -> None:
        super().__init__(specs)
        self.collections = nn.ModuleList(_collection(spec, device) for spec in specs)

    def look_up(self, number: int, ids: KeyedJaggedTensor) -> Tensor:
        spec, found = self.specs[number], self.collections[number](ids)
        if spec.kind != "sequences":
            vectors: Tensor = found.values()
            return vectors
        return torch.cat([_summed(jagged.values(), jagged.lengths()) for jagged in found.values()], 1)


class PlainModel(Scores):
    """With `nn.EmbeddingBag` and `nn.Embedding`, which begin with the rows' initial values."""

    def __init__(self, specs: Sequence[CollectionSpec], seed: int = 0) -> None:
        super().__init__(specs)
        self.tables = nn.ModuleDict()
        for spec in specs:
            for table in spec.tables:
                bound = (1 / table.rows) ** 0.5
                row_table = RowTable(name=table.name, dim=table.dim, rows=table.rows, init_bound=bound)
                weights = initial_weights(row_table, torch.arange(table.rows).numpy(), seed=seed, dtype="float64")
                if spec.kind == "sequences":
                    self.tables[table.name] = nn.Embedding.from_pretrained(weights, freeze=False)
                else:
                    mode = "mean" if table.pooling == PoolingType.MEAN else "sum"
                    self.tables[table.name] = nn.EmbeddingBag.from_pretrained(
                        weights, freeze=False, mode=mode, include_last_offset=True
                    )

    def look_up(self, number: int, ids: KeyedJaggedTensor) -> Tensor:
        spec, by_key, parts = self.specs[number], ids.to_dict(), []
        for table in spec.tables:
            held = self.tables[table.name]
            for name in table.features:
                one = by_key[name]
                if spec.kind == "sequences":
                    parts.append(_summed(held(one.values().long()), one.lengths()))
                else:
                    weights = one.weights() if spec.kind == "weighted" else None
                    parts.append(held(one.values().long(), one.offsets().long(), per_sample_weights=weights))
        return torch.cat(parts, 1)


class PlainRows:
    """The row optimizers of a plain model, by formula: SGD and Adagrad of torch, row-wise Adagrad."""

    def __init__(self, model: PlainModel) -> None:
        self._sums: dict[str, Tensor] = {}
        self._model = model
        self._optimizers = {table.name: table.optimizer for spec in model.specs for table in spec.tables}

    @torch.no_grad()
    def step(self) -> None:
        for name, held in self._model.tables.items():
            optimizer, weight = self._optimizers[name], held.weight
            if weight.grad is None or isinstance(optimizer, Frozen):
                continue
            rate, gradient = optimizer.lr, weight.grad
            if optimizer.name == "sgd":
                weight -= rate * gradient
                continue
            squares = gradient.square()
            if isinstance(optimizer, RowWiseAdagrad):
                squares = squares.mean(1, keepdim=True)
            total = self._sums[name] = self._sums.get(name, torch.zeros_like(squares)) + squares
            weight -= rate * gradient / (total.sqrt() + optimizer.eps)


def batches_of(specs: Sequence[CollectionSpec], num: int, seed: int, *, dtype: torch.dtype) -> list[Any]:
    """Batches with a KeyedJaggedTensor for each key, its features in any order and among others; ids of `dtype`."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        features: dict[str, tuple[Tensor, Tensor]] = {}
        batch = {}
        for key in dict.fromkeys(spec.key for spec in specs):
            sharing = [spec for spec in specs if spec.key == key]
            names = list(dict.fromkeys(name for spec in sharing for name in spec.features))
            for name in (*names, UNUSED):
                rows = min([t.rows for s in specs for t in s.tables if name in t.features], default=1000)
                lengths = torch.randint(0, 4, (sharing[0].examples,), generator=generator)
                ids = torch.randint(0, rows, (int(lengths.sum()),), generator=generator).to(dtype)
                features.setdefault(name, (ids, lengths))
            features[UNUSED] = (ids, lengths)
            order = [(*names, UNUSED)[i] for i in torch.randperm(len(names) + 1, generator=generator)]
            values = torch.cat([features[name][0] for name in order])
            batch[key] = KeyedJaggedTensor(
                keys=order,
                values=values,
                lengths=torch.cat([features[name][1] for name in order]),
                weights=torch.rand(len(values), generator=generator, dtype=torch.float64),
                stride=sharing[0].examples,
            )
        made.append(batch)
    return made


def _collection(spec: CollectionSpec, device: str) -> nn.Module:
    where = torch.device(device)
    if spec.kind == "sequences":
        return EmbeddingCollection(
            device=where,
            tables=[
                EmbeddingConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=list(t.features))
                for t in spec.tables
            ],
        )
    return EmbeddingBagCollection(
        device=where,
        is_weighted=spec.kind == "weighted",
        tables=[
            EmbeddingBagConfig(
                name=t.name,
                embedding_dim=t.dim,
                num_embeddings=t.rows,
                feature_names=list(t.features),
                pooling=t.pooling,
            )
            for t in spec.tables
        ],
    )


def _summed(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Per example the sum of its vectors, weighted by their positions in the batch."""
    factors = torch.arange(1, len(vectors) + 1, dtype=vectors.dtype).reciprocal().unsqueeze(1)
    examples = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    return vectors.new_zeros(len(lengths), vectors.shape[1]).index_add(0, examples, vectors * factors)
