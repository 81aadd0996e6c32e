"""Drop-in replacements for torchrec's embedding collections, whose rows live in a `RowCache`.

    model with EmbeddingBagCollection / EmbeddingCollection (meta device)
        ──convert──> Converted: model with cached collections, row_tables, features, layout
        ──bind(cache)──> forward(KeyedJaggedTensor) reads the rows of the batch begun in the cache

The forward contracts are torchrec's: the same keys in the same order, ``feature@table`` where tables share a feature.
Differences: ids must be those of the batch, which the plan covers; results have the dtype of the dense part, also where
`data_type` makes the rows of a table FP16 or BF16; and there is no
``embedding_bags.<table>.weight``, because rows are not parameters. The cache updates them and the store keeps them.
They appear neither in ``parameters()`` nor in ``state_dict()``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from bagpipe.cache.lookup_layout import LookupLayout, Pooling, TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.cached_lookup import CachedLookup, Column
from bagpipe.embedding.materialise import materialise
from bagpipe.embedding.table_configs import dtype_of, row_table
from bagpipe.embedding.table_dtypes import RowDtypes, TableDtypes
from bagpipe.embedding.table_optimizers import TableOptimizers
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.optim import RowOptimizer, RowOptimizers
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.schema import DataSchema, RowSchema, RowTable

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_configs import PoolingType
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollection,
        EmbeddingCollectionInterface,
        get_embedding_names_by_table,
    )
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["CachedEmbeddingBagCollection", "CachedEmbeddingCollection", "Converted", "convert"]

#: A torchrec collection or table config: torchrec has no type information.
Untyped: TypeAlias = Any

_Forward = TypeVar("_Forward", bound=Callable[..., Any])

_POOLINGS: dict[PoolingType, Pooling] = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


def _not_compiled(forward: _Forward) -> _Forward:
    """Leave a lookup out of what torch.compile traces: it has checks on the host, and gradients that are no tensors."""
    reason = "rows of a cache are looked up outside of compiled code"
    outside: _Forward = torch.compiler.disable(forward, reason=reason)  # type: ignore[no-untyped-call]
    return outside


class CachedEmbeddingBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """`torchrec.EmbeddingBagCollection` with rows in a cache: KeyedJaggedTensor -> KeyedTensor."""

    def __init__(
        self, *, configs: list[Any], is_weighted: bool, cached_lookup: CachedLookup, device: torch.device
    ) -> None:
        super().__init__()
        self.cached_lookup = cached_lookup
        self._configs = configs
        self._is_weighted = is_weighted
        self._device = device
        self._names = [column.name for column in cached_lookup.columns]
        self._dims = [column.dim for column in cached_lookup.columns]

    @_not_compiled
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors ``[num_examples, sum of dims]``.

        Raises:
            InputError: `features` is not the batch that the cache has begun.
        """
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=self.cached_lookup.pooled(features))

    def embedding_bag_configs(self) -> list[Any]:
        return self._configs

    def is_weighted(self) -> bool:
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        return self._device


class CachedEmbeddingCollection(EmbeddingCollectionInterface):  # type: ignore[misc]
    """`torchrec.EmbeddingCollection` with rows in a cache: KeyedJaggedTensor -> {name: JaggedTensor}."""

    def __init__(
        self, *, configs: list[Any], need_indices: bool, cached_lookup: CachedLookup, device: torch.device
    ) -> None:
        super().__init__()
        self.cached_lookup = cached_lookup
        self._configs = configs
        self._need_indices = need_indices
        self._device = device

    @_not_compiled
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """For each embedding name, the vectors ``[ids of the feature, dim]`` in the order of the ids.

        Raises:
            InputError: `features` is not the batch that the cache has begun.
        """
        cached_lookup = self.cached_lookup
        batch, starts = cached_lookup.begin(features)
        vectors = []
        for group in cached_lookup.groups:
            sizes = batch.groups[group.index].context.segment_sizes
            vectors.append(torch.split(cached_lookup.vectors(batch, group, features, starts), list(sizes)))
        lengths = features.lengths().view(len(features.keys()), -1)
        key_numbers = {key: number for number, key in enumerate(features.keys())}
        out = {}
        for column in cached_lookup.columns:
            values = vectors[column.group][column.segment]
            ids = features.values().narrow(0, starts[column.feature], len(values)) if self._need_indices else None
            out[column.name] = JaggedTensor(
                values=values, lengths=lengths[key_numbers[column.feature_name]], weights=ids
            )
        return out

    def embedding_configs(self) -> list[Any]:
        return self._configs

    def need_indices(self) -> bool:
        return self._need_indices

    def embedding_dim(self) -> int:
        return int(self._configs[0].embedding_dim)

    def embedding_names_by_table(self) -> list[list[str]]:
        names: list[list[str]] = get_embedding_names_by_table(self._configs)
        return names

    @property
    def device(self) -> torch.device:
        return self._device


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A model with embedding rows in a cache.

    Attributes:
        model: the given model with its collections replaced, or the replacement of a given collection.
        row_tables: cached tables, by table number; for `RowSchema.tables`.
        features: occurrence segments, sorted by table number; for `OracleSpec.features`.
        layout: table groups; for `prepare_batch`.
        lookups: one per collection.
        optimizers: row optimizers as given, by table number; none were given: empty.
        optimizer: row optimizer of the tables that name none, for `RowSchema.optimizer`; none were given: None.
        dtype: of the rows of the tables that name none, for `RowSchema.dtype`.
    """

    model: nn.Module
    row_tables: tuple[RowTable, ...]
    features: tuple[FeatureRef, ...]
    layout: LookupLayout
    lookups: tuple[CachedLookup, ...]
    optimizers: tuple[RowOptimizer, ...] = ()
    optimizer: str | None = None
    dtype: str = "float32"

    def row_schema(self, *, optimizer: str = "sgd", seed: int, rounding: str) -> RowSchema:
        """The schema of the rows.

        Args:
            optimizer: if none were given.
            seed: of the initial values and of rounding.
            rounding: of half rows, if there are any.
        """
        shared = optimizer if self.optimizer is None else self.optimizer
        schema = RowSchema(tables=self.row_tables, optimizer=shared, dtype=self.dtype, seed=seed)
        return replace(schema, rounding=rounding) if schema.has_half_rows else schema

    def bind(self, cache: RowCache) -> None:
        """Make the collections read from `cache`.

        Raises:
            InputError: the cache was created for other tables.
        """
        cache.check_tables(self.row_tables)
        for cached_lookup in self.lookups:
            cached_lookup.bind(cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    """One table of a collection."""

    config: Any
    lookup: TableLookup


def convert(
    model: nn.Module,
    schema: DataSchema,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    optimizers: RowOptimizers | None = None,
    table_rows: Mapping[str, int | None] | None = None,
    row_dtype: RowDtypes | None = None,
) -> Converted:
    """Make a torchrec model, usually built on the meta device, read its embedding rows from a cache.

    Every `EmbeddingBagCollection` and `EmbeddingCollection` is replaced, at any depth; existing table values are
    dropped. Other parameters on the meta device are allocated and reset: seed torch's generator before.

    Tables are numbered collection by collection, grouped by pooling, dimension, row dtype and row optimizer: by its
    name, so that another learning rate changes no number.

    Args:
        model: the model, modified in place.
        schema: schema of the data; table configs refer to its feature names. A table whose data has no vocabulary
            (``rows = None``) is unbounded, regardless of `num_embeddings`.
        device: device of the dense part.
        dtype: ``float32`` or ``float64``, for the dense part, and for the rows of tables whose `data_type` is FP32.
        optimizers: of the rows, by table name (`bagpipe.optim.optimizers_of`); None: one for all, the row schema's.
        table_rows: rows of each table, by name, None for an unbounded one. None: as the data's vocabularies say.
        row_dtype: dtype of the rows, for all tables or by table name, over their `data_type`.

    Raises:
        InputError: the model has no collection, a table name is used twice, the data lacks a feature, a table is
            smaller than its vocabulary, or a table setting is not supported; or `optimizers` or `row_dtype` does
            not fit the tables.
    """
    where = torch.device(device)
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    collections: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    if not collections:
        raise InputError(f"expected a model with torchrec embedding collections, {type(model).__name__} has none")
    configs = [config for module in collections for config in _configs(module)]
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"table names must be unique over all collections, {name!r} appears more than once")
    updates = TableOptimizers.of(optimizers, names)
    dtypes = TableDtypes.of(row_dtype, {config.name: dtype_of(config) or dtype for config in configs}, compute=dtype)
    members = [
        member for number, module in enumerate(collections) for member in _members(number, module, updates, dtypes)
    ]
    names = [member.config.name for member in members]
    feature_numbers = {feature.name: number for number, feature in enumerate(schema.features)}
    tables = dtypes.named(updates.named(row_table(member.config, schema, table_rows) for member in members))
    features = tuple(
        FeatureRef(feature=feature_numbers[name], table=number)
        for number, member in enumerate(members)
        for name in member.config.feature_names
    )
    layout = build_layout(tables, features, [member.lookup for member in members], updates.settings(names))
    replaced: dict[nn.Module, nn.Module] = {}
    lookups = []
    for number, module in enumerate(collections):
        columns = _columns(number, _configs(module), names, layout, feature_numbers)
        cached_lookup = CachedLookup(
            number=number, feature_names=tuple(feature_numbers), layout=layout, columns=columns
        )
        lookups.append(cached_lookup)
        replaced[module] = _replacement(module, cached_lookup, where)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):  # `named_children` leaves out a second name of a module
            inner = child if child is None else _compiled(child)
            if inner in replaced:
                setattr(parent, key, replaced[inner])
    model = replaced.get(_compiled(model), model)
    materialise(model, where, TORCH_DTYPE[dtype])
    return Converted(
        model=model,
        row_tables=tables,
        features=features,
        layout=layout,
        lookups=tuple(lookups),
        optimizers=updates.ordered(names),
        optimizer=updates.shared,
        dtype=dtypes.shared,
    )


def _compiled(module: nn.Module) -> nn.Module:
    """The module that a result of ``torch.compile`` calls; any other module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def _configs(module: Untyped) -> list[Any]:
    configs: list[Any] = (
        module.embedding_bag_configs() if isinstance(module, EmbeddingBagCollection) else module.embedding_configs()
    )
    return configs


def _replacement(module: Untyped, cached_lookup: CachedLookup, device: torch.device) -> nn.Module:
    new: nn.Module
    if isinstance(module, EmbeddingBagCollection):
        new = CachedEmbeddingBagCollection(
            configs=_configs(module), is_weighted=module.is_weighted(), cached_lookup=cached_lookup, device=device
        )
    else:
        new = CachedEmbeddingCollection(
            configs=_configs(module), need_indices=module.need_indices(), cached_lookup=cached_lookup, device=device
        )
    new.train(module.training)
    return new


def _members(number: int, module: Untyped, updates: TableOptimizers, dtypes: TableDtypes) -> list[_Member]:
    """The tables of a collection, grouped by pooling, dimension, row optimizer and dtype, otherwise in order."""
    groups: dict[tuple[Pooling, int, str | None, str | None], list[_Member]] = {}
    pooled = isinstance(module, EmbeddingBagCollection)
    weighted = bool(pooled and module.is_weighted())
    for config in _configs(module):
        pooling: Pooling = _POOLINGS[config.pooling] if pooled else "none"
        if weighted and pooling != "sum":
            raise InputError(f"table {config.name!r}: a weighted collection needs sum pooling, got {pooling}")
        lookup = TableLookup(collection=number, pooling=pooling, weighted=weighted)
        key = pooling, config.embedding_dim, updates.name(config.name), dtypes.name(config.name)
        groups.setdefault(key, []).append(_Member(config=config, lookup=lookup))
    return [member for group in groups.values() for member in group]


def _columns(
    number: int, configs: list[Any], table_names: Sequence[str], layout: LookupLayout, feature_numbers: dict[str, int]
) -> list[Column]:
    """The embedding names of a collection in torchrec's order, each with the position of its segment."""
    columns = []
    for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
        table = table_names.index(config.name)
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
