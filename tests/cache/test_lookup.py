"""Forward and backward of a table group against `nn.EmbeddingBag` and indexing, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.lookup import ActiveTableGroup, gradients_of, lookup
from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.upload import Uploader
from bagpipe.errors import JobError
from bagpipe.kernels.interface import RowView
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import consumer_plan, random_batch

NUM_IDS, DIM = 11, 6
CASES = {
    "one-hot": (TableLookup(), 1, 1),
    "sum": (TableLookup(), 0, 4),
    "mean": (TableLookup(pooling="mean"), 0, 4),
    "mean-one-hot": (TableLookup(pooling="mean"), 1, 1),
    "weighted": (TableLookup(weighted=True), 0, 4),
    "weighted-one-hot": (TableLookup(weighted=True), 1, 1),
    "sequence": (TableLookup(pooling="none"), 0, 4),
    "all-empty": (TableLookup(), 0, 0),
}
SEGMENT_TABLES = (0, 0, 1)


def gradient_of(group: ActiveTableGroup) -> Tensor:
    """Gradients of all rows."""
    return group.kernels.sum(gradients_of(group, 0))


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def make_group(lookup_of_tables: TableLookup, batch: Batch, weights: Sequence[Tensor]) -> ActiveTableGroup:
    """The group of a batch whose rows come from whole tables ``weights[table][id]``."""
    tables = [RowTable(name="a", dim=DIM), RowTable(name="b", dim=DIM)]
    features = [FeatureRef(feature=feature, table=table) for feature, table in enumerate(SEGMENT_TABLES)]
    layout = build_layout(tables, features, [lookup_of_tables] * 2)
    plan = consumer_plan(batch, layout.features, 2, lambda n: np.arange(n, dtype=np.int32))
    (group,) = prepare_batch(layout, batch, plan, upload=Uploader(torch.device("cpu"), torch.float64)).groups
    ids, offsets = torch.from_numpy(group.local.rows.ids), group.local.rows.table_offsets
    rows = [weights[table].detach()[ids[offsets[table] : offsets[table + 1]]] for table in range(2)]
    schema = RowSchema(tables=tuple(tables), optimizer="sgd", dtype="float64")
    view = RowView(records=torch.cat(rows), slot_index=None, dim=DIM)
    return ActiveTableGroup(
        context=group, rows=view, dtype=view.records.dtype, kernels=TorchKernels(schema, torch.device("cpu"))
    )


def reference(table_lookup: TableLookup, batch: Batch, weights: Sequence[Tensor], per_id: Tensor | None) -> Tensor:
    starts = batch.feature_offsets()
    out = []
    for feature, table in enumerate(SEGMENT_TABLES):
        ids = torch.from_numpy(batch.values[starts[feature] : starts[feature + 1]])
        if table_lookup.pooling == "none":
            out.append(weights[table][ids])
            continue
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(batch.lengths[feature])]))
        out.append(
            nn.functional.embedding_bag(
                ids,
                weights[table],
                offsets,
                mode=table_lookup.pooling,
                per_sample_weights=None if per_id is None else per_id[starts[feature] : starts[feature + 1]],
                include_last_offset=True,
            )
        )
    return torch.cat(out, dim=0 if table_lookup.pooling == "none" else 1)


@pytest.mark.parametrize("case", list(CASES))
def test_equals_embedding_bag(case: str) -> None:
    table_lookup, min_length, max_length = CASES[case]
    rng = np.random.default_rng(5)
    batch = random_batch(
        rng,
        num_examples=9,
        num_ids=[NUM_IDS] * 3,
        min_length=min_length,
        max_length=max_length,
        weighted=table_lookup.weighted,
    )
    weights = [torch.randn(NUM_IDS, DIM, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    group = make_group(table_lookup, batch, weights)
    ours = theirs = None
    if batch.weights is not None:
        ours = torch.from_numpy(batch.weights).double().requires_grad_()
        theirs = ours.detach().clone().requires_grad_()
    vectors = lookup(group, ours)
    expected = reference(table_lookup, batch, weights, theirs)
    close(vectors, expected)

    factor = torch.randn_like(expected)
    (vectors * factor).sum().backward()
    (expected * factor).sum().backward()
    gradient = gradient_of(group)
    offsets = group.context.local.rows.table_offsets
    for table, weight in enumerate(weights):
        ids = torch.from_numpy(group.context.local.rows.ids[offsets[table] : offsets[table + 1]])
        assert weight.grad is not None
        close(gradient[offsets[table] : offsets[table + 1]], weight.grad[ids])
    if ours is not None and theirs is not None:
        assert ours.grad is not None
        assert theirs.grad is not None
        close(ours.grad, theirs.grad)


def test_two_lookups_of_one_group_sum_their_gradients() -> None:
    batch = random_batch(np.random.default_rng(1), num_examples=4, num_ids=[NUM_IDS] * 3, max_length=3, weighted=True)
    weights = [torch.randn(NUM_IDS, DIM, dtype=torch.float64) for _ in range(2)]
    gradients = []
    for scales in ([1.0], [2.0], [1.0, 2.0]):
        group = make_group(TableLookup(weighted=True), batch, weights)
        assert batch.weights is not None
        per_id = torch.from_numpy(batch.weights).double()
        total = sum((lookup(group, per_id * scale).sum() for scale in scales), torch.zeros(()))
        total.backward()
        gradients.append(gradient_of(group))
    first, second, both = gradients
    close(both, first + second)


def test_gradient_that_is_not_contiguous() -> None:
    """``sum().backward()`` delivers an expanded scalar; a slice of a wider concatenation has wide rows."""
    batch = random_batch(np.random.default_rng(2), num_examples=4, num_ids=[NUM_IDS] * 3, max_length=3)
    weights = [torch.randn(NUM_IDS, DIM, dtype=torch.float64) for _ in range(2)]
    expanded = make_group(TableLookup(), batch, weights)
    lookup(expanded).sum().backward()
    sliced = make_group(TableLookup(), batch, weights)
    vectors = lookup(sliced)
    wide = torch.cat([torch.zeros(4, 3, dtype=torch.float64), vectors], dim=1)
    (wide * torch.ones_like(wide)).sum().backward()
    first, second = gradient_of(expanded), gradient_of(sliced)
    assert torch.equal(first, second)


def test_without_gradients() -> None:
    batch = random_batch(np.random.default_rng(2), num_examples=4, num_ids=[NUM_IDS] * 3, max_length=3)
    group = make_group(TableLookup(), batch, [torch.randn(NUM_IDS, DIM, dtype=torch.float64) for _ in range(2)])
    with torch.no_grad():
        assert not lookup(group).requires_grad
    assert group.gradients == []
    with pytest.raises(JobError, match="backward did not reach them"):
        gradient_of(group)


def test_late_backward_is_refused() -> None:
    batch = random_batch(np.random.default_rng(2), num_examples=4, num_ids=[NUM_IDS] * 3, max_length=3)
    group = make_group(TableLookup(), batch, [torch.randn(NUM_IDS, DIM, dtype=torch.float64) for _ in range(2)])
    vectors = lookup(group)
    group.closed = True
    with pytest.raises(JobError, match="backward ran after the rows of its batch were updated"):
        vectors.sum().backward()
