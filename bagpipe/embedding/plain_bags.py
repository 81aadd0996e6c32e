"""`CachedBags`: embedding bags whose rows live in a `RowCache`, for models in plain torch.

    DataSchema ──CachedBags──> row_tables, features, layout      (for oracle, cache and store)
    Batch ──PlainInputs──> dense, HostBags, labels ──> CachedBags ──> [num_examples, sum of dims]

The plan covers the ids of the batch, so the forward needs none: ids stay on the host, and only per-id weights go to the
device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.cache.lookup_layout import LookupLayout, Pooling, TableLookup, build_layout
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.upload import Uploader
from bagpipe.embedding.cached_lookup import CachedLookup, Column, JaggedInput
from bagpipe.embedding.table_dtypes import RowDtypes, TableDtypes
from bagpipe.embedding.table_optimizers import TableOptimizers
from bagpipe.optim import RowOptimizers
from bagpipe.oracle.plan import FeatureRef, OracleSpec
from bagpipe.types.batch import Batch
from bagpipe.types.model_inputs import ModelInputs
from bagpipe.types.schema import DataSchema, RowTable, Table

__all__ = ["CachedBags", "HostBags", "PlainInputs"]

#: Tables without pooling are summed, as in `bagpipe.models.torchrec_models`.
_POOLINGS: dict[str, Pooling] = {"sum": "sum", "mean": "mean", "none": "sum"}


class HostBags:
    """The sparse part of a batch, as a `JaggedInput`. Ids and lengths are on the host.

    Args:
        batch: the batch.
        names: names of its features.
        weights: ``[num_occurrences]`` per-id weights on the model's device; None: unweighted.
    """

    def __init__(self, batch: Batch, names: Sequence[str], weights: Tensor | None = None) -> None:
        self._names = list(names)
        self._values = torch.from_numpy(batch.values)
        self._lengths = torch.from_numpy(batch.lengths.reshape(-1))
        self._weights = weights
        self._num_examples = batch.num_examples
        self._batch = batch

    def keys(self) -> list[str]:
        return self._names

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def stride(self) -> int:
        return self._num_examples

    def length_per_key(self) -> list[int]:
        sizes: list[int] = np.diff(self._batch.feature_offsets()).tolist()
        return sizes

    def variable_stride_per_key(self) -> bool:
        return False


class PlainInputs:
    """Makes the inputs of ``model(dense, sparse)`` with `HostBags` as `sparse`; for `Engine.prepare`.

    Args:
        schema: schema of the data.
    """

    def __init__(self, schema: DataSchema) -> None:
        self._names = [feature.name for feature in schema.features]
        self._weighted = any(feature.weighted for feature in schema.features)

    def __call__(self, batch: Batch, upload: Uploader) -> ModelInputs | None:
        """The inputs of one batch; None without examples."""
        if not batch.num_examples:
            return None
        dense = batch.dense if batch.dense.shape[1] else np.ones((batch.num_examples, 1), np.float32)
        return ModelInputs(
            dense=upload.numbers(dense),
            sparse=HostBags(batch, self._names, self._weights(batch, upload)),
            labels=upload.numbers(batch.targets),
        )

    def _weights(self, batch: Batch, upload: Uploader) -> Tensor | None:
        if not self._weighted:
            return None
        return upload.numbers(np.ones(len(batch.values), np.float32) if batch.weights is None else batch.weights)


class CachedBags(nn.Module):
    """One pooled vector per feature and example, from the batch that a cache has begun.

    Rows are not parameters: the cache updates them, and the store keeps them.

    Args:
        schema: schema of the data. Rows of a table with a vocabulary start uniform in ``±sqrt(1 / rows)``, others in
            the default of `RowTable.init_bound`.
        embedding_dim: dimension of tables that have none in the schema.
        optimizers: of the rows, by table name (`bagpipe.optim.optimizers_of`); None: one for all, the row schema's.
        row_dtype: of the rows, for all tables or by table name, else float32; None: one for all, the row schema's.

    Attributes:
        row_tables: cached tables by table number, grouped by pooling, dimension, optimizer and dtype; for
            `RowSchema.tables`.
        features: occurrence segments, sorted by table number; for `OracleSpec.features`.
        layout: table groups; for `Engine`.
        dims: dimension of each feature's vector, in schema order.
        optimizers: row optimizers as given, by table number; none were given: empty.
        optimizer: row optimizer of the tables that name none, for `RowSchema.optimizer`; none were given: None.
        dtype: of the rows of the tables that name none, for `RowSchema.dtype`; none was given: None.
    """

    def __init__(
        self,
        schema: DataSchema,
        embedding_dim: int,
        optimizers: RowOptimizers | None = None,
        row_dtype: RowDtypes | None = None,
    ) -> None:
        super().__init__()
        weighted = any(feature.weighted for feature in schema.features)
        updates = TableOptimizers.of(optimizers, [table.name for table in schema.tables])
        dtypes = TableDtypes.of(row_dtype, {table.name: "float32" for table in schema.tables}, compute="float32")
        groups: dict[tuple[Pooling, int, str | None, str | None], list[Table]] = {}
        for table in schema.tables:
            key = (
                _POOLINGS[table.pooling],
                table.dim or embedding_dim,
                updates.name(table.name),
                dtypes.name(table.name),
            )
            groups.setdefault(key, []).append(table)
        members = [(pooling, dim, table) for (pooling, dim, *_), tables in groups.items() for table in tables]
        table_names = [table.name for _, _, table in members]
        self.row_tables = dtypes.named(updates.named(_row_table(table, dim) for _, dim, table in members))
        self.dtype = None if row_dtype is None else dtypes.shared
        self.optimizers, self.optimizer = updates.ordered(table_names), updates.shared
        self.features = tuple(
            FeatureRef(feature=position, table=number)
            for number, (_, _, table) in enumerate(members)
            for position, feature in enumerate(schema.features)
            if feature.table == table.name
        )
        # A weighted feature's table is never mean-pooled (`DataSchema`); the weights of other features are ones.
        lookups = [TableLookup(pooling=pooling, weighted=weighted and pooling == "sum") for pooling, _, _ in members]
        settings = updates.settings(table_names)
        self.layout: LookupLayout = build_layout(self.row_tables, self.features, lookups, settings)
        names = [feature.name for feature in schema.features]
        columns = _columns(self.layout, names)
        self.dims = tuple(column.dim for column in columns)
        self._lookup = CachedLookup(number=0, feature_names=names, layout=self.layout, columns=columns)

    def spec(self, *, num_slots: int, lookahead: int, grows: bool = False) -> OracleSpec:
        """The oracle's specification for one rank."""
        return OracleSpec(
            table_rows=tuple(table.rows for table in self.row_tables),
            features=self.features,
            num_slots=num_slots,
            lookahead=lookahead,
            grows=grows,
        )

    def bind(self, cache: RowCache) -> None:
        """Read from `cache`.

        Raises:
            InputError: the cache was created for other tables.
        """
        cache.check_tables(self.row_tables)
        self._lookup.bind(cache)

    def forward(self, sparse: JaggedInput) -> Tensor:
        """``[num_examples, sum(dims)]``, features in schema order.

        Raises:
            JobError, InputError: see `CachedLookup.begin`.
        """
        return self._lookup.pooled(sparse)


def _row_table(table: Table, dim: int) -> RowTable:
    if table.rows is None:
        return RowTable(name=table.name, dim=dim)
    return RowTable(name=table.name, dim=dim, rows=table.rows, init_bound=math.sqrt(1 / table.rows))


def _columns(layout: LookupLayout, names: Sequence[str]) -> list[Column]:
    """The features in batch order, each with the position of its segment."""
    columns = []
    for position, ref in enumerate(layout.features):
        group = next(group for group in layout.groups if group.first_segment <= position < group.end_segment)
        columns.append(
            Column(
                name=names[ref.feature],
                feature_name=names[ref.feature],
                feature=ref.feature,
                group=group.index,
                segment=position - group.first_segment,
                dim=group.dim,
            )
        )
    return sorted(columns, key=lambda column: column.feature)
