"""Drop-in replacements for torchrec's embedding collections, whose rows live in a `RowCache`.

    model with EmbeddingBagCollection / EmbeddingCollection (meta device)
        ──convert──> Converted: the collections have become cached ones; row_tables, features, layout
        ──bind(cache)──> forward(KeyedJaggedTensor) reads the rows of the batch begun in the cache

A collection becomes a cached one in place: whoever holds it, or a hook on it, goes on with the same object.

The forward contracts are torchrec's: the same keys in the same order, ``feature@table`` where tables share a feature.
Differences: ids must be among those of the batch, which the plan covers; results have the dtype of the dense part, also
where `data_type` makes the rows of a table FP16 or BF16; and there is no ``embedding_bags.<table>.weight``, because
rows are not parameters. The cache updates them and the store keeps them.
They appear neither in ``parameters()`` nor in ``state_dict()`` (`stored_tables`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from bagpipe.cache.lookup_layout import LookupLayout, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.embedding.cached_lookup import CachedLookup
from bagpipe.embedding.materialise import materialise
from bagpipe.embedding.numbered_tables import columns_of, members_of
from bagpipe.embedding.stored_tables import StoredTables, described
from bagpipe.embedding.table_configs import configs_of, dtype_of, row_table, table_names_of
from bagpipe.embedding.table_dtypes import RowDtypes, TableDtypes
from bagpipe.embedding.table_optimizers import TableOptimizers
from bagpipe.errors import InputError
from bagpipe.kernels.initialization import TORCH_DTYPE
from bagpipe.optim import RowOptimizer, RowOptimizers
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.schema import DataSchema, RowSchema, RowTable

with warnings.catch_warnings():  # torchrec and fbgemm warn about parts that a CPU build lacks
    warnings.simplefilter("ignore")
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
        get_embedding_names_by_table,
    )
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["CachedEmbeddingBagCollection", "CachedEmbeddingCollection", "Converted", "convert"]

#: A torchrec collection or table config: torchrec has no type information.
Untyped: TypeAlias = Any

_Forward = TypeVar("_Forward", bound=Callable[..., Any])


def _not_compiled(forward: _Forward) -> _Forward:
    """Leave a lookup out of what torch.compile traces: it has checks on the host, and gradients that are no tensors."""
    reason = "rows of a cache are looked up outside of compiled code"
    outside: _Forward = torch.compiler.disable(forward, reason=reason)  # type: ignore[no-untyped-call]
    return outside


class CachedEmbeddingBagCollection(EmbeddingBagCollectionInterface):  # type: ignore[misc]
    """`torchrec.EmbeddingBagCollection` with rows in a cache: KeyedJaggedTensor -> KeyedTensor."""

    def __init__(
        self,
        *,
        configs: list[Any],
        table_names: tuple[str, ...],
        is_weighted: bool,
        cached_lookup: CachedLookup,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.cached_lookup = cached_lookup
        self.table_names = table_names
        self._configs = configs
        self._is_weighted = is_weighted
        self._device = device
        self._names = [column.name for column in cached_lookup.columns]
        self._dims = [column.dim for column in cached_lookup.columns]

    @_not_compiled
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors ``[num_examples, sum of dims]``.

        Raises:
            InputError: `features` has ids that the batch does not have, which the cache has begun.
        """
        return KeyedTensor(keys=self._names, length_per_key=self._dims, values=self.cached_lookup.pooled(features))

    @property
    def embedding_bags(self) -> StoredTables:
        """What stands for torchrec's modules, which have weights."""
        return StoredTables(self._configs, self.table_names)

    def extra_repr(self) -> str:
        return described(self._configs, self.table_names)

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
        self,
        *,
        configs: list[Any],
        table_names: tuple[str, ...],
        need_indices: bool,
        cached_lookup: CachedLookup,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.cached_lookup = cached_lookup
        self.table_names = table_names
        self._configs = configs
        self._need_indices = need_indices
        self._device = device

    @_not_compiled
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """For each embedding name, the vectors ``[ids of the feature, dim]`` in the order of the ids.

        Raises:
            InputError: `features` has ids that the batch does not have, which the cache has begun.
        """
        cached_lookup = self.cached_lookup
        call = cached_lookup.begin(features)
        starts = call.starts
        vectors = [
            torch.split(cached_lookup.vectors(call, position), list(context.segment_sizes))
            for position, context in enumerate(call.contexts)
        ]
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

    @property
    def embeddings(self) -> StoredTables:
        """What stands for torchrec's modules, which have weights."""
        return StoredTables(self._configs, self.table_names)

    def extra_repr(self) -> str:
        return described(self._configs, self.table_names)

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
        model: the given model, its collections now cached ones.
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


def convert(
    model: nn.Module,
    schema: DataSchema,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    dense_dtype: str | None = "",
    optimizers: RowOptimizers | None = None,
    table_rows: Mapping[str, int | None] | None = None,
    row_dtype: RowDtypes | None = None,
    imported: Collection[str] = (),
) -> Converted:
    """Make a torchrec model, usually built on the meta device, read its embedding rows from a cache.

    Every `EmbeddingBagCollection` and `EmbeddingCollection` becomes a cached one, at any depth; existing table values
    are dropped. Other parameters on the meta device are allocated and reset: seed torch's generator before.

    Tables are numbered collection by collection, grouped by pooling, dimension, row dtype and row optimizer: by its
    name, so that another learning rate changes no number. A table whose name several collections have is named after
    the path of its collection too (`table_names_of`).

    Args:
        model: the model, modified in place. Everything that can be refused is compared before.
        schema: schema of the data; table configs refer to its feature names. A table whose data has no vocabulary
            (``rows = None``) is unbounded, regardless of `num_embeddings`.
        device: device of the dense part.
        dtype: ``float32`` or ``float64``, of vectors, and of the rows of tables whose `data_type` is FP32.
        dense_dtype: of the dense part's floating-point tensors; empty: `dtype`; None: as they are.
        optimizers: of the rows, by table name (`bagpipe.optim.optimizers_of`); None: one for all, the row schema's.
        table_rows: rows of each table, by name, None for an unbounded one. None: as the data's vocabularies say.
        row_dtype: dtype of the rows, for all tables or by table name, over their `data_type`.
        imported: names of tables that begin with the weights of their collection; see `row_table`.

    Raises:
        InputError: the model has no collection, the data lacks a feature, a table is smaller than its vocabulary, or
            a table setting is not supported; or `optimizers` or `row_dtype` does not fit the tables.
    """
    where = torch.device(device)
    collections = table_names_of(model)
    if not collections:
        raise InputError(f"expected a model with torchrec embedding collections, {type(model).__name__} has none")
    configs = {
        name: config
        for module, names in collections.items()
        for name, config in zip(names, configs_of(module), strict=True)
    }
    updates = TableOptimizers.of(optimizers, list(configs))
    dtypes = TableDtypes.of(
        row_dtype, {name: dtype_of(config) or dtype for name, config in configs.items()}, compute=dtype
    )
    members = [
        member
        for number, (module, names) in enumerate(collections.items())
        for member in members_of(number, module, names, updates, dtypes)
    ]
    names = [member.name for member in members]
    feature_numbers = {feature.name: number for number, feature in enumerate(schema.features)}
    tables = dtypes.named(
        updates.named(
            row_table(member.config, schema, table_rows, name=member.name, imported=imported) for member in members
        )
    )
    features = tuple(
        FeatureRef(feature=feature_numbers[name], table=number)
        for number, member in enumerate(members)
        for name in member.config.feature_names
    )
    layout = build_layout(tables, features, [member.lookup for member in members], updates.settings(names))
    lookups = []
    for number, (module, own) in enumerate(collections.items()):
        columns = columns_of(number, configs_of(module), own, names, layout, feature_numbers)
        cached_lookup = CachedLookup(
            number=number, feature_names=tuple(feature_numbers), layout=layout, columns=columns
        )
        lookups.append(cached_lookup)
        _become(module, _cached(module, own, cached_lookup, where))
    kept = dtype if dense_dtype == "" else dense_dtype
    materialise(model, where, None if kept is None else TORCH_DTYPE[kept])
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


def _cached(
    module: Untyped, table_names: tuple[str, ...], cached_lookup: CachedLookup, device: torch.device
) -> nn.Module:
    """The cached collection in place of one of torchrec's."""
    same: dict[str, Any] = {
        "configs": configs_of(module),
        "table_names": table_names,
        "cached_lookup": cached_lookup,
        "device": device,
    }
    if isinstance(module, EmbeddingBagCollection):
        return CachedEmbeddingBagCollection(is_weighted=module.is_weighted(), **same)
    return CachedEmbeddingCollection(need_indices=module.need_indices(), **same)


def _become(module: nn.Module, other: nn.Module) -> None:
    """Make a collection the other one, in place. Its mode, its hooks and what its user has set on it stay."""
    module._modules.clear()
    vars(module).update({name: value for name, value in vars(other).items() if name not in vars(nn.Module())})
    module.__class__ = type(other)
