"""Weighted and mean-pooled tables in one module: any schema's vectors are torch's, in the order of the tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.embedding.torchrec_collections import convert
from bagpipe.kernels.initialization import initial_weights
from bagpipe.models.torchrec_models import embedding_bags
from bagpipe.oracle.plan import OracleSpec
from bagpipe.testing.plain_job import plan_rank_batches
from bagpipe.types.batch import Batch
from bagpipe.types.schema import DataSchema, Feature, RowSchema, RowTable, Table
from trainer.inputs import InputMaker

NUM_IDS = 9
NUM_SLOTS = 100


@st.composite
def schemas(draw: st.DrawFn) -> DataSchema:
    """One to five features over up to four tables, each mean-pooled or with weights or neither."""
    tables = [
        Table(name=f"t{number}", dim=draw(st.integers(1, 3)), pooling=draw(st.sampled_from(["sum", "mean"])))
        for number in range(draw(st.integers(1, 4)))
    ]
    used = draw(st.lists(st.sampled_from(tables), min_size=1, max_size=5))
    features = tuple(
        Feature(name=f"f{number}", table=table.name, weighted=table.pooling == "sum" and draw(st.booleans()))
        for number, table in enumerate(used)
    )
    return DataSchema(label="y", dense=(), features=features, tables=tuple(table for table in tables if table in used))


def batch_of(schema: DataSchema, seed: int) -> Batch:
    """Weights of features without them are ones, as readers make them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (len(schema.features), 3), dtype=np.int32)
    count = int(lengths.sum())
    weighted = np.repeat([feature.weighted for feature in schema.features], lengths.sum(axis=1))
    weights = np.where(weighted, rng.standard_normal(count, np.float32), np.float32(1))
    return Batch(
        index=0,
        dense=np.zeros((3, 0), np.float32),
        values=rng.integers(0, NUM_IDS, count),
        lengths=lengths,
        labels=np.ones(3, np.float32),
        weights=weights if any(feature.weighted for feature in schema.features) else None,
    )


def forward(schema: DataSchema, batch: Batch) -> tuple[Any, tuple[RowTable, ...]]:
    """The KeyedTensor of the schema's tables over initial rows, and these tables."""
    converted = convert(embedding_bags(schema, 4), schema, dtype="float64")
    rows = RowSchema(tables=converted.row_tables, optimizer="sgd", dtype="float64", seed=3)
    cache = RowCache(rows, NUM_SLOTS)
    converted.bind(cache)
    spec = OracleSpec(
        table_rows=(None,) * len(rows.tables), features=converted.features, num_slots=NUM_SLOTS, lookahead=1
    )
    (rank_batch,) = plan_rank_batches([batch], spec)
    cache.insert(rank_batch.owner, FetchRequests.of(rank_batch.owner, skip_new=True), [])
    with cache.uploads(1).batch() as upload:
        context = prepare_batch(converted.layout, batch, rank_batch.consumer, upload=upload)
        inputs = InputMaker(schema)(batch, upload)
    cache.begin(context)
    return converted.model(inputs.sparse), rows.tables


def expected(schema: DataSchema, batch: Batch, tables: dict[str, RowTable], name: str) -> Tensor:
    """``[3, dim]``: torch's own bags of one feature."""
    number = [feature.name for feature in schema.features].index(name)
    feature, offsets = schema.features[number], batch.feature_offsets()
    part = slice(offsets[number], offsets[number + 1])
    weights = initial_weights(tables[feature.table], np.arange(NUM_IDS), seed=3, dtype="float64")
    bags = nn.EmbeddingBag.from_pretrained(weights, mode=schema.table(feature.table).pooling)
    starts = torch.from_numpy(np.cumsum(batch.lengths[number]) - batch.lengths[number]).long()
    per_id = None
    if feature.weighted:
        assert batch.weights is not None
        per_id = torch.from_numpy(batch.weights[part]).double()
    vectors: Tensor = bags(torch.from_numpy(batch.values[part]), starts, per_sample_weights=per_id)
    return vectors


@given(schema=schemas(), seed=st.integers(0, 99))
def test_any_mixture_gives_torchs_vectors_table_after_table(schema: DataSchema, seed: int) -> None:
    batch = batch_of(schema, seed)
    pooled, row_tables = forward(schema, batch)
    names = [item.name for table in schema.tables for item in schema.features if item.table == table.name]
    assert pooled.keys() == names
    tables = {table.name: table for table in row_tables}
    vectors = [expected(schema, batch, tables, name) for name in names]
    torch.testing.assert_close(pooled.values(), torch.cat(vectors, dim=1), rtol=1e-12, atol=1e-12)
    assert pooled.length_per_key() == [vector.shape[1] for vector in vectors]
