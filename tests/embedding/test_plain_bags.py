"""Plain embedding bags: vectors in the order of the features, for any order of the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.embedding.plain_bags import CachedBags, HostBags, PlainInputs
from bagpipe.errors import InputError, JobError
from bagpipe.kernels.initialization import initial_weights
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, Table

TABLES = (Table(name="A", rows=50), Table(name="B", dim=4), Table(name="C", pooling="mean"))
#: Two tables with equal layout, and between them two of another width or pooling.
SCHEMA = DataSchema(
    label="label",
    dense=("I1", "I2"),
    features=tuple(Feature(name=name, table=table) for name, table in (("a", "A"), ("b", "B"), ("c", "C"), ("d", "A"))),
    tables=TABLES,
)
NAMES = [feature.name for feature in SCHEMA.features]


def batch_of(schema: DataSchema) -> Batch:
    generator = np.random.default_rng(3)
    lengths = generator.integers(0, 4, (len(schema.features), 6), dtype=np.int32)
    count = int(lengths.sum())
    has_weights = np.repeat([feature.weighted for feature in schema.features], lengths.sum(axis=1))
    weights = np.where(has_weights, generator.random(count, np.float32), np.float32(1))
    return Batch(
        index=0,
        dense=generator.random((6, len(schema.dense)), np.float32),
        values=generator.integers(0, 50, count),
        lengths=lengths,
        labels=np.ones(6, np.float32),
        weights=weights if has_weights.any() else None,
    )


def pooled(schema: DataSchema, batch: Batch) -> tuple[CachedBags, RowCache, Tensor]:
    """A forward over rows with initial values."""
    bags = CachedBags(schema, 8)
    cache = RowCache(RowSchema(tables=bags.row_tables, optimizer="sgd", seed=7), 200)
    bags.bind(cache)
    (rank_batch,) = plan_rank_batches([batch], bags.spec(num_slots=200, lookahead=1))
    cache.insert(rank_batch.owner, FetchRequests.of(rank_batch.owner, skip_new=True), [])
    with cache.uploads(1).batch() as upload:
        context = prepare_batch(bags.layout, batch, rank_batch.consumer, upload=upload)
        inputs = PlainInputs(schema)(batch, upload)
    cache.begin(context)
    return bags, cache, bags(inputs.sparse)


def expected(schema: DataSchema, bags: CachedBags, batch: Batch) -> Iterator[Tensor]:
    """Reference: feature by feature, bag by bag."""
    offsets = batch.feature_offsets()
    for number, feature in enumerate(schema.features):
        table = next(table for table in bags.row_tables if table.name == feature.table)
        mean = schema.table(feature.table).pooling == "mean"
        stops = offsets[number] + np.cumsum(batch.lengths[number])
        vectors = []
        for start, stop in zip(stops - batch.lengths[number], stops, strict=True):
            rows = initial_weights(table, batch.values[start:stop], seed=7)
            if batch.weights is not None:
                rows = rows * torch.from_numpy(batch.weights[start:stop]).unsqueeze(1)
            vectors.append(rows.mean(0) if mean and len(rows) else rows.sum(0))
        yield torch.stack(vectors)


@pytest.mark.parametrize("weighted", ["", "b", "abcd"])
def test_vectors_match_the_ids(weighted: str) -> None:
    """`c` is mean-pooled unless it has weights. The weights of other features are ones."""
    schema = dataclasses.replace(
        SCHEMA,
        features=tuple(dataclasses.replace(item, weighted=item.name in weighted) for item in SCHEMA.features),
        tables=tuple(dataclasses.replace(item, pooling="sum" if "c" in weighted else item.pooling) for item in TABLES),
    )
    batch = batch_of(schema)
    bags, _, vectors = pooled(schema, batch)
    assert bags.dims == (8, 4, 8, 8)
    torch.testing.assert_close(vectors, torch.cat(list(expected(schema, bags, batch)), dim=1))


def test_tables_that_are_read_alike_are_one_group() -> None:
    bags = CachedBags(SCHEMA, 8)
    assert [table.name for table in bags.row_tables] == ["A", "B", "C"]
    narrow = dataclasses.replace(SCHEMA, tables=(*SCHEMA.tables[:2], Table(name="C")))
    assert [table.name for table in CachedBags(narrow, 8).row_tables] == ["A", "C", "B"]
    assert len(CachedBags(narrow, 8).layout.groups) == 2


def test_a_forward_reads_nothing_but_the_batch_begun() -> None:
    batch = batch_of(SCHEMA)
    bags, cache, _ = pooled(SCHEMA, batch)
    with pytest.raises(InputError, match="add up to 28, but 27 ids"):
        bags(HostBags(dataclasses.replace(batch, values=batch.values[1:]), NAMES))
    cache.clear()
    with pytest.raises(JobError, match="rows only while a pipeline computes a batch"):
        bags(HostBags(batch, NAMES))


def test_a_cache_for_other_tables_is_refused() -> None:
    bags = CachedBags(SCHEMA, 8)
    with pytest.raises(InputError, match="expected a cache for tables"):
        bags.bind(RowCache(RowSchema(tables=bags.row_tables[:1], optimizer="sgd"), 10))


def test_data_without_dense_columns_gets_a_constant() -> None:
    schema = dataclasses.replace(SCHEMA, dense=())
    batch = batch_of(schema)
    _, cache, _ = pooled(schema, batch)
    with cache.uploads(1).batch() as upload:
        dense = PlainInputs(schema)(batch, upload).dense
    assert torch.equal(dense, torch.ones(6, 1))
