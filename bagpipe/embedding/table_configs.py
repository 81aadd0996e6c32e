"""Tables of torchrec's collections as tables of rows.

EmbeddingBagConfig, EmbeddingConfig ──row_table──> RowTable: name, dim, rows, bound of the initial weights
                                    ──dtype_of──> dtype of its rows
model ──collections_of──> its collections ──table_names_of──> names of their tables
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from bagpipe.errors import InputError
from bagpipe.types.schema import Absent, DataSchema, RowTable, Table

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_configs import DataType, PoolingType
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollection,
        EmbeddingCollectionInterface,
    )

__all__ = [
    "UNBOUNDED_INIT_BOUND",
    "collections_of",
    "configs_of",
    "dtype_of",
    "other_collections_of",
    "row_table",
    "table_names_of",
]

#: A torchrec table config: torchrec has no type information.
Untyped: TypeAlias = Any

#: Initial bound of a table without a vocabulary, where torchrec's sqrt(1 / num_embeddings) is meaningless.
UNBOUNDED_INIT_BOUND = 0.01

#: Dtype of rows by `data_type`; None: that of the dense part.
_DTYPES: dict[DataType, str | None] = {DataType.FP32: None, DataType.FP16: "float16", DataType.BF16: "bfloat16"}


#: Parts of a module's path that torch.compile adds.
_WRAPPED = "_orig_mod"


def collections_of(model: nn.Module) -> dict[Untyped, str]:
    """The torchrec collections of a model, each with its first path, in order; wrappers of torch.compile left out."""
    found: dict[Untyped, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            found[module] = ".".join(part for part in path.split(".") if part != _WRAPPED)
    return found


def other_collections_of(model: nn.Module) -> list[tuple[str, str]]:
    """Paths and classes of torchrec's other embedding collections in a model: fused, quantised, …"""
    kinds = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    return [
        (path, type(module).__name__)
        for path, module in model.named_modules()
        if isinstance(module, kinds)
        and not isinstance(module, (EmbeddingBagCollection, EmbeddingCollection))
        and type(module).__module__.startswith("torchrec.")
    ]


def configs_of(collection: Untyped) -> list[Any]:
    """The table configs of a collection, in its order."""
    configs: list[Any] = (
        collection.embedding_bag_configs()
        if isinstance(collection, EmbeddingBagCollection)
        else collection.embedding_configs()
    )
    return configs


def table_names_of(model: nn.Module) -> dict[Untyped, tuple[str, ...]]:
    """The names of the tables of each collection of a model, in the order of its configs; none is there twice.

    A name that torchrec has once in the model stays as it is. One that several collections have follows the path of
    its collection: ``deep.user`` and ``history.user``.
    """
    collections = collections_of(model)
    counts = Counter(config.name for collection in collections for config in configs_of(collection))
    return {
        collection: tuple(
            config.name if counts[config.name] == 1 else f"{path}.{config.name}" for config in configs_of(collection)
        )
        for collection, path in collections.items()
    }


def dtype_of(config: Untyped) -> str | None:
    """Dtype of the rows of a table, a key of `ROW_TYPES`; None: that of the dense part.

    Raises:
        InputError: rows cannot have its `data_type`.
    """
    if config.data_type not in _DTYPES:
        known = ", ".join(kind.value for kind in _DTYPES)
        raise InputError(f"table {config.name!r}: data_type must be one of {known}, got {config.data_type.value}")
    return _DTYPES[config.data_type]


def row_table(
    config: Untyped,
    schema: DataSchema,
    table_rows: Mapping[str, int | None] | None = None,
    *,
    name: str = "",
    imported: Collection[str] = (),
) -> RowTable:
    """The rows of a table, with the optimizer and the dtype of the row schema.

    Args:
        config: of the table.
        schema: of the data; it has the features of the table.
        table_rows: rows of each table, by name, None for an unbounded one. None: as the data's vocabularies say.
        name: of the table in the model; empty: that of its config.
        imported: names of the tables that begin with the weights of their collection. What these were initialised
            with does not matter then, unless other ids can come.

    Raises:
        InputError: the data lacks a feature, the table is smaller than its vocabulary, or a setting is not supported.
    """
    name = name or config.name
    known = {feature.name: feature for feature in schema.features}
    unknown = [feature for feature in config.feature_names if feature not in known]
    if unknown:
        raise InputError(f"table {name!r} reads feature {unknown[0]!r}, the data has {list(known)}")
    vocabularies = [schema.table(known[feature].table).rows for feature in config.feature_names]
    absent = _absent([schema.table(known[feature].table) for feature in config.feature_names], config)
    if table_rows is not None:
        rows = table_rows[name]
    else:
        rows = None if None in vocabularies else max((size for size in vocabularies if size is not None), default=0)
    if rows is not None and config.num_embeddings < rows:
        raise InputError(
            f"table {name!r}: num_embeddings must be at least the data's {rows}, got {config.num_embeddings}"
        )
    is_bounded = rows is not None
    return RowTable(
        name=name,
        dim=config.embedding_dim,
        rows=None if rows is None else rows + (absent == "default"),
        init_bound=(
            _default_bound(config, is_bounded=True)
            if is_bounded and name in imported
            else _init_bound(config, is_bounded=is_bounded)
        ),
        absent=absent,
    )


def _absent(tables: Sequence[Table], config: Untyped) -> Absent:
    """What an id without a row reads: what the data's table says.

    Raises:
        InputError: several tables of the data say it, or the table's pooling cannot leave ids out.
    """
    kinds = {table.absent for table in tables}
    if kinds <= {"initial"}:
        return "initial"
    if len({table.name for table in tables}) > 1:
        names = ", ".join(sorted({table.name for table in tables}))
        raise InputError(
            f"table {config.name!r}: expected features of one table of the data with data.min_uses above 1, got those "
            f"of {names}"
        )
    absent = tables[0].absent
    pooling = getattr(config, "pooling", None)
    if absent == "zero" and pooling is not PoolingType.SUM:
        raise InputError(
            f"table {config.name!r}: data.default_row zero leaves ids out of bags, so it must be sum-pooled: use "
            "trained"
        )
    return absent


def _init_bound(config: Untyped, *, is_bounded: bool) -> float:
    """Bound of the uniform initial weights in ``[-bound, bound)``; other initialisers are errors."""
    numbers = config.get_weight_init_min(), config.get_weight_init_max()
    uniform = numbers if config.init_fn is None else _uniform(config.init_fn)
    if uniform is None:
        raise InputError(
            f"table {config.name!r}: init_fn is not supported, since initial rows are a pure function of (seed, table, "
            "id, column); expected weight_init_max or nothing, or weights that are imported"
        )
    low, high = uniform
    if uniform == numbers:  # torchrec's config makes its init_fn of its numbers, where none is given
        low, high = config.weight_init_min, config.weight_init_max
        if high is None and low is None:
            return _default_bound(config, is_bounded=is_bounded)
    if high is None or high <= 0 or (low is not None and low != -high):
        raise InputError(
            f"table {config.name!r}: expected weight_init_max above 0 and weight_init_min = -weight_init_max, "
            f"or neither, got {high} and {low}"
        )
    return float(high)


def _uniform(init_fn: Untyped) -> tuple[float, float] | None:
    """The bounds of a partial ``uniform_``; None: the function is another one."""
    is_uniform = isinstance(init_fn, functools.partial) and init_fn.func is nn.init.uniform_ and not init_fn.args
    if not is_uniform or not init_fn.keywords.keys() <= {"a", "b"}:
        return None
    return init_fn.keywords.get("a", 0.0), init_fn.keywords.get("b", 1.0)


def _default_bound(config: Untyped, *, is_bounded: bool) -> float:
    return math.sqrt(1 / config.num_embeddings) if is_bounded else UNBOUNDED_INIT_BOUND
