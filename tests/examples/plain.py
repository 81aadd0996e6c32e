"""Plain PyTorch training of a model with torchrec collections: the reference of the examples.

    model on the meta device ─ collections ─> modules over nn.EmbeddingBag / nn.Embedding, whole tables as parameters
    batches ─> forward, backward, one torch.optim optimizer per table and one of the dense parameters

Of this project it uses the initial rows alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from bagpipe.kernels.initialization import initial_weights
from bagpipe.types.schema import RowTable

__all__ = [
    "MakeOptimizer",
    "Trained",
    "collections_of",
    "doubled",
    "initial_rows",
    "jagged_tensors",
    "load_initial_values",
    "plain_training",
    "weight_of",
    "with_plain_tables",
]

#: Parameters -> their optimizer.
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class PlainBags(nn.Module):
    """`EmbeddingBagCollection` over one `nn.EmbeddingBag` per table."""

    def __init__(self, configs: Sequence[Any], rows: Callable[[Any], Tensor], sparse: Callable[[str], bool]) -> None:
        super().__init__()
        self.configs = configs
        self.tables = nn.ModuleDict(
            {
                config.name: nn.EmbeddingBag.from_pretrained(
                    rows(config), freeze=False, mode=config.pooling.value.lower(), sparse=sparse(config.name)
                )
                for config in configs
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        bags = features.to_dict()
        vectors = {}
        for config, names in zip(self.configs, get_embedding_names_by_table(self.configs), strict=True):
            for name, feature in zip(names, config.feature_names, strict=True):
                bag = bags[feature]
                vectors[name] = self.tables[config.name](bag.values(), bag.offsets()[:-1])
        return KeyedTensor(
            keys=list(vectors),
            length_per_key=[vector.shape[1] for vector in vectors.values()],
            values=torch.cat(list(vectors.values()), dim=1),
        )


class PlainSequences(nn.Module):
    """`EmbeddingCollection` over one `nn.Embedding` per table."""

    def __init__(self, configs: Sequence[Any], rows: Callable[[Any], Tensor], sparse: Callable[[str], bool]) -> None:
        super().__init__()
        self.configs = configs
        self.tables = nn.ModuleDict(
            {
                config.name: nn.Embedding.from_pretrained(rows(config), freeze=False, sparse=sparse(config.name))
                for config in configs
            }
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        sequences = features.to_dict()
        return {
            name: JaggedTensor(
                values=self.tables[config.name](sequences[feature].values()), lengths=sequences[feature].lengths()
            )
            for config, names in zip(self.configs, get_embedding_names_by_table(self.configs), strict=True)
            for name, feature in zip(names, config.feature_names, strict=True)
        }


def collections_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, type[PlainBags | PlainSequences], list[Any]]]:
    """The collections of a model: parent, name there, class of the plain replacement, configs of the tables."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, EmbeddingBagCollection):
                yield parent, name, PlainBags, child.embedding_bag_configs()
            elif isinstance(child, EmbeddingCollection):
                yield parent, name, PlainSequences, child.embedding_configs()


def weight_of(collection: Any, table: str) -> Tensor:
    """A table of a collection that holds its own weights."""
    modules = collection.embedding_bags if isinstance(collection, EmbeddingBagCollection) else collection.embeddings
    weight: Tensor = modules[table].weight
    return weight


def initial_rows(config: Any, seed: int, dtype: str) -> Tensor:
    """Initial weights ``[num_embeddings, dim]`` of a bounded table."""
    bound = config.weight_init_max or math.sqrt(1 / config.num_embeddings)
    table = RowTable(name=config.name, dim=config.embedding_dim, rows=config.num_embeddings, init_bound=bound)
    return initial_weights(table, np.arange(config.num_embeddings), seed=seed, dtype=dtype)


def load_initial_values(model: nn.Module, same: nn.Module) -> None:
    """Give a model whose float32 tables are on the CPU the initial values of training with seed 0.

    Args:
        model: the model.
        same: another one, with tables on the meta device. (Tables elsewhere draw from the generator that the dense
            parameters come from.)
    """
    dense = {name: value for name, value in same.state_dict().items() if not value.is_meta}
    model.load_state_dict(dense, strict=False)
    for parent, name, _, configs in collections_of(model):
        for config in configs:
            weight_of(getattr(parent, name), config.name).data.copy_(initial_rows(config, 0, "float32"))


def with_plain_tables(
    model: nn.Module, *, seed: int, dtype: str, sparse: Callable[[str], bool] = lambda name: False
) -> dict[str, nn.Parameter]:
    """Replace the collections of `model`, in place.

    Args:
        model: the model; its dense parameters are converted to `dtype`.
        seed, dtype: of the initial rows.
        sparse: whether a table's gradient is sparse.

    Returns:
        Table name -> all its rows.
    """
    model.to(getattr(torch, dtype))
    tables = {}
    for parent, name, plain_class, configs in list(collections_of(model)):
        plain = plain_class(configs, lambda config: initial_rows(config, seed, dtype), sparse)
        setattr(parent, name, plain)
        tables |= {config.name: plain.tables[config.name].weight for config in configs}
    return tables


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trained:
    """What training left.

    Attributes:
        losses: of each batch.
        dense: parameter name -> value.
        tables: table name -> rows ``[num_embeddings, dim]``.
    """

    losses: list[float]
    dense: Mapping[str, Tensor]
    tables: Mapping[str, Tensor]


def plain_training(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    rows: Mapping[str, MakeOptimizer],
    dense: MakeOptimizer,
    seed: int = 0,
    dtype: str = "float64",
    num_parts: int = 1,
) -> Trained:
    """Train `model` on all batches, in order.

    Args:
        model: a model with torchrec collections; called as ``model(batch) -> (loss, outputs)``.
        batches: its batches.
        rows: table name -> optimizer of its rows; ``*``: of the tables not named. `torch.optim.SparseAdam` gets sparse
            gradients.
        dense: optimizer of all other parameters.
        seed: of the initial rows.
        dtype: of rows, dense parameters and batches.
        num_parts: so many of `batches`, of equal sizes, make one step on the mean of their losses.
    """

    def of_table(name: str) -> MakeOptimizer:
        return rows[name if name in rows else "*"]

    def sparse(name: str) -> bool:
        return isinstance(of_table(name)([nn.Parameter(torch.zeros(1, 1))]), torch.optim.SparseAdam)

    tables = with_plain_tables(model, seed=seed, dtype=dtype, sparse=sparse)
    of_tables = {id(parameter) for parameter in tables.values()}
    others = {name: value for name, value in model.named_parameters() if id(value) not in of_tables}
    optimizers = [of_table(name)([parameter]) for name, parameter in tables.items()]
    optimizers.append(dense(list(others.values())))
    losses = []
    parts = iter(batches)
    while step := list(islice(parts, num_parts)):
        total = sum(model(doubled(part) if dtype == "float64" else part)[0] for part in step)
        loss = total / len(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return Trained(
        losses=losses,
        dense={name: value.detach() for name, value in others.items()},
        tables={name: value.detach() for name, value in tables.items()},
    )


def doubled(value: Any) -> Any:
    """`value` with its floating-point tensors as float64: tensors, jagged tensors, dicts, tuples and dataclasses."""
    match value:
        case Tensor():
            return value.double() if value.is_floating_point() else value
        case KeyedJaggedTensor():
            assert value.weights_or_none() is None
            return value
        case dict():
            return {key: doubled(item) for key, item in value.items()}
        case tuple():
            return tuple(doubled(item) for item in value)
    return dataclasses.replace(value, **{name: doubled(item) for name, item in vars(value).items()})


def jagged_tensors(value: Any) -> Iterator[KeyedJaggedTensor]:
    """The KeyedJaggedTensors of a batch."""
    match value:
        case Tensor():
            return
        case KeyedJaggedTensor():
            yield value
        case tuple():
            yield from (found for item in value for found in jagged_tensors(item))
        case _:
            items = value if isinstance(value, dict) else vars(value)
            yield from (found for item in items.values() for found in jagged_tensors(item))
