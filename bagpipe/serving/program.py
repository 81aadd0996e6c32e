"""The dense part of a model as a program of torch operations, for `torch.export`. The only module here with torchrec.

    model on the meta device ──collections_of──> columns: the pooled vectors that it reads
        ──as_dense_part──> collections replaced by their inputs ──trained weights──> DensePart
        ──save_program──> dense.pt2: (numbers [n, d], {column: vectors [n, dim]}) -> logits [n] of each head

The program has no operation of torchrec or fbgemm, any number of examples, and no pickle in its file.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bagpipe.dense.loss import as_heads
from bagpipe.embedding.table_configs import table_names_of
from bagpipe.serving.manifest import Column
from bagpipe.util.utf8_path import utf8_path

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingCollection,
        get_embedding_names_by_table,
    )
    from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["DensePart", "NoProgram", "as_dense_part", "columns_of", "save_program"]

#: A torchrec collection or table config: torchrec has no type information.
Untyped: TypeAlias = Any

_POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}

#: Examples of the traced call. Neither 0 nor 1, which torch.export takes for constants.
_NUM_EXAMPLES = 5


class NoProgram(Exception):
    """The model cannot be exported as a program. One line: why."""


class _PooledInputs(nn.Module):
    """Stands for a collection: its output are the vectors that `DensePart` was called with."""

    def __init__(self, keys: list[str], inputs: list[str], dims: list[int]) -> None:
        super().__init__()
        self.vectors: Mapping[str, Tensor] = {}
        self._keys, self._inputs, self._dims = keys, inputs, dims

    def forward(self, *_: Any) -> KeyedTensor:
        values = torch.cat([self.vectors[name] for name in self._inputs], dim=1)
        return KeyedTensor(keys=self._keys, length_per_key=self._dims, values=values)


class DensePart(nn.Module):
    """A model whose collections are replaced by inputs.

    Args:
        model: called as ``model(dense, sparse)``; its collections are replaced.
        columns: the inputs.
        pooled: the modules that stand for the collections.

    Attributes:
        columns: the inputs, in order.
        model: with the names of the trained weights.
    """

    def __init__(self, model: nn.Module, columns: tuple[Column, ...], pooled: list[_PooledInputs]) -> None:
        super().__init__()
        self.columns = columns
        self.model = model
        self._pooled = pooled

    def forward(self, dense: Tensor, vectors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Logits ``[n]`` of each head.

        Args:
            dense: ``[n, num_dense]``.
            vectors: ``[n, dim]`` by name of the column.
        """
        for module in self._pooled:
            module.vectors = vectors
        try:
            return as_heads(self.model(dense, None))
        finally:
            for module in self._pooled:
                module.vectors = {}


def as_dense_part(model: nn.Module) -> DensePart:
    """Replace a model's collections by inputs.

    Args:
        model: as built, on the meta device or not; changed in place.

    Raises:
        NoProgram: it has a collection of sequences, or none of bags.
    """
    collections = table_names_of(model)
    if any(isinstance(collection, EmbeddingCollection) for collection in collections):
        raise NoProgram("it reads sequences (EmbeddingCollection), and a program has pooled vectors for inputs")
    if not collections or isinstance(model, EmbeddingBagCollection):
        raise NoProgram("it has no EmbeddingBagCollection inside")
    inputs: dict[nn.Module, _PooledInputs] = {}
    columns = columns_of(collections)
    for (module, tables), named in zip(collections.items(), columns, strict=True):
        keys = [column.name for column in _outputs(module, tables)]
        inputs[module] = _PooledInputs(keys, [column.name for column in named], [column.dim for column in named])
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child in inputs:
                setattr(parent, key, inputs[child])
    return DensePart(model, tuple(column for named in columns for column in named), list(inputs.values()))


def save_program(part: DensePart, path: Path, *, num_dense: int, dtype: torch.dtype) -> None:
    """Export a dense part with trained weights, in evaluation mode. Equal parts give equal files.

    Args:
        part: the model has its weights, on the CPU.
        path: of the new file, ``….pt2``.
        num_dense: width of the numbers.
        dtype: of numbers and vectors.

    Raises:
        NoProgram: torch cannot export the model.
        OSError: the file cannot be written.
    """
    part.eval()
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(_NUM_EXAMPLES, num_dense, generator=generator, dtype=dtype)
    vectors = {
        column.name: torch.rand(_NUM_EXAMPLES, column.dim, generator=generator, dtype=dtype) for column in part.columns
    }
    examples = torch.export.Dim("examples", min=1)
    shapes = {"dense": {0: examples}, "vectors": {name: {0: examples} for name in vectors}}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of torch, about itself
            program = torch.export.export(part, (dense, vectors), dynamic_shapes=shapes)
    except Exception as error:  # any: the code is the user's
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise NoProgram(f"torch.export: {type(error).__name__}: {reason}") from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine
    program._example_inputs = None  # torch would write them as a pickle
    with utf8_path(path) as writable:
        torch.export.save(program, writable)


def columns_of(collections: Mapping[Untyped, Sequence[str]]) -> list[list[Column]]:
    """The columns of each collection of bags, cached or torchrec's, in its order.

    A column has the name of its feature, or ``feature@table`` if several of them read it.

    Args:
        collections: with the names of their tables in the model.
    """
    found = [_outputs(collection, names) for collection, names in collections.items()]
    features = Counter(column.feature for columns in found for column in columns)
    return [
        [
            replace(
                column, name=column.feature if features[column.feature] == 1 else f"{column.feature}@{column.table}"
            )
            for column in columns
        ]
        for columns in found
    ]


def _outputs(collection: Untyped, tables: Sequence[str]) -> list[Column]:
    """The outputs of a collection in its order, by torchrec's names."""
    configs = collection.embedding_bag_configs()
    return [
        Column(
            name=name,
            feature=feature,
            table=table,
            pooling=_POOLINGS[config.pooling],
            weighted=bool(collection.is_weighted()),
            dim=int(config.embedding_dim),
        )
        for table, config, names in zip(tables, configs, get_embedding_names_by_table(configs), strict=True)
        for name, feature in zip(names, config.feature_names, strict=True)
    ]
