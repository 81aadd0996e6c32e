"""The tables of a model's collections while these are numbered, and the columns that each collection returns.

collection, names of its tables ──members_of──> its tables in groups; the groups of all collections, one after another,
                                                give the numbers
collection, numbers, layout     ──columns_of──> where its embedding names are in the layout
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from bagpipe.cache.lookup_layout import LookupLayout, Pooling, TableLookup
from bagpipe.embedding.cached_lookup import Column
from bagpipe.embedding.table_configs import configs_of
from bagpipe.embedding.table_dtypes import TableDtypes
from bagpipe.embedding.table_optimizers import TableOptimizers
from bagpipe.errors import InputError

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table

__all__ = ["Member", "columns_of", "members_of"]

#: A torchrec collection or table config: torchrec has no type information.
Untyped: TypeAlias = Any

_POOLINGS: dict[PoolingType, Pooling] = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One table of a collection.

    Attributes:
        name: in the model.
        config: torchrec's.
        lookup: its lookups.
    """

    name: str
    config: Any
    lookup: TableLookup


def members_of(
    number: int, module: Untyped, names: Sequence[str], updates: TableOptimizers, dtypes: TableDtypes
) -> list[Member]:
    """The tables of a collection, grouped by pooling, dimension, row optimizer and dtype, otherwise in order."""
    groups: dict[tuple[Pooling, int, str | None, str | None], list[Member]] = {}
    pooled = isinstance(module, EmbeddingBagCollection)
    weighted = bool(pooled and module.is_weighted())
    for name, config in zip(names, configs_of(module), strict=True):
        pooling: Pooling = _POOLINGS[config.pooling] if pooled else "none"
        if weighted and pooling != "sum":
            raise InputError(f"table {name!r}: a weighted collection needs sum pooling, got {pooling}")
        lookup = TableLookup(collection=number, pooling=pooling, weighted=weighted)
        key = pooling, config.embedding_dim, updates.name(name), dtypes.name(name)
        groups.setdefault(key, []).append(Member(name=name, config=config, lookup=lookup))
    return [member for group in groups.values() for member in group]


def columns_of(
    number: int,
    configs: list[Any],
    own_names: Sequence[str],
    table_names: Sequence[str],
    layout: LookupLayout,
    feature_numbers: dict[str, int],
) -> list[Column]:
    """The embedding names of a collection in torchrec's order, each with the position of its segment."""
    columns = []
    for own, config, names in zip(own_names, configs, get_embedding_names_by_table(configs), strict=True):
        table = table_names.index(own)
        first = next(position for position, ref in enumerate(layout.features) if ref.table == table)
        groups = layout.collection_groups(number)
        group = next(position for position, group in enumerate(groups) if group.first_table <= table < group.end_table)
        for offset, (name, feature_name) in enumerate(zip(names, config.feature_names, strict=True)):
            columns.append(
                Column(
                    name=name,
                    feature_name=feature_name,
                    feature=feature_numbers[feature_name],
                    group=group,
                    segment=first + offset - groups[group].first_segment,
                    dim=config.embedding_dim,
                )
            )
    return columns
