"""Lookups in parts give the vectors and gradients of the whole batch, bit for bit, however it is divided."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagpipe.cache.batch_context import prepare_batch
from bagpipe.cache.lookup import ActiveBatch, ActiveTableGroup, gradients_of, lookup
from bagpipe.cache.lookup_layout import TableLookup, build_layout
from bagpipe.cache.micro_batches import active_parts, join_gradients
from bagpipe.cache.upload import Uploader
from bagpipe.errors import JobError
from bagpipe.kernels.interface import RowView
from bagpipe.kernels.torch_kernels import TorchKernels
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import consumer_plan, random_batch
from tests.effort import at_most

NUM_IDS, DIM, NUM_EXAMPLES = 11, 6, 9
LOOKUPS = {
    "sum": TableLookup(),
    "mean": TableLookup(pooling="mean"),
    "weighted": TableLookup(weighted=True),
    "sequence": TableLookup(pooling="none"),
}


def _batch(kind: str, max_length: int, seed: int, cuts: list[int]) -> Batch:
    """A batch with parts that end at `cuts`."""
    batch = random_batch(
        np.random.default_rng(seed),
        num_examples=NUM_EXAMPLES,
        num_ids=[NUM_IDS] * 3,
        min_length=int(max_length == 1),
        max_length=max_length,
        weighted=kind == "weighted",
    )
    bounds = [0, *sorted(cuts), NUM_EXAMPLES]
    return dataclasses.replace(
        batch, parts=tuple(batch.select(np.arange(first, end)) for first, end in pairwise(bounds))
    )


def _begun(kind: str, batch: Batch) -> ActiveBatch:
    tables = [RowTable(name="a", dim=DIM), RowTable(name="b", dim=DIM)]
    features = [FeatureRef(feature=feature, table=table) for feature, table in enumerate((0, 0, 1))]
    layout = build_layout(tables, features, [LOOKUPS[kind]] * 2)
    plan = consumer_plan(batch, layout.features, 2, lambda n: np.arange(n, dtype=np.int32))
    context = prepare_batch(layout, batch, plan, upload=Uploader(torch.device("cpu"), torch.float64))
    rows = torch.randn(context.groups[0].num_rows, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    schema = RowSchema(tables=tuple(tables), optimizer="sgd", dtype="float64")
    group = ActiveTableGroup(
        context=context.groups[0],
        rows=RowView(records=rows, slot_index=None, dim=DIM),
        dtype=rows.dtype,
        kernels=TorchKernels(schema, torch.device("cpu")),
    )
    return ActiveBatch(context=context, groups=(group,), versions=context.versions)


def _weights(batch: Batch) -> Tensor | None:
    return None if batch.weights is None else torch.from_numpy(batch.weights).double()


def _of_part(kind: str, whole: Tensor, batch: ActiveBatch, part: int) -> Tensor:
    """The vectors of a micro-batch among those of the whole batch."""
    spans = batch.context.parts[part].gradient_rows[0]
    by_row = whole.reshape(-1, DIM)
    rows = torch.cat([by_row[:0], *(by_row[start:end] for start, end in spans)])
    return rows if kind == "sequence" else rows.view(-1, whole.shape[1])


@at_most(40)
@given(
    kind=st.sampled_from(sorted(LOOKUPS)),
    max_length=st.integers(0, 4),
    seed=st.integers(0, 100),
    cuts=st.lists(st.integers(0, NUM_EXAMPLES), max_size=4),
    times=st.integers(1, 2),
)
def test_parts_join_to_the_whole(kind: str, max_length: int, seed: int, cuts: list[int], times: int) -> None:
    batch = _batch(kind, max_length, seed, cuts)
    reference, joined = _begun(kind, batch), _begun(kind, batch)
    weights = _weights(batch)
    wholes = [lookup(reference.groups[0], weights) for _ in range(times)]
    factors = [torch.randn(whole.shape, dtype=torch.float64) for whole in wholes]
    torch.stack([(whole * factor).sum() for whole, factor in zip(wholes, factors, strict=True)]).sum().backward()
    parts = active_parts(joined)
    for number, (part, own) in enumerate(zip(parts, batch.parts, strict=True)):
        vectors = [lookup(part.groups[0], _weights(own)) for _ in range(times)]
        for got, whole in zip(vectors, wholes, strict=True):
            assert torch.equal(got, _of_part(kind, whole, reference, number))
        mine = [_of_part(kind, factor, reference, number) for factor in factors]
        torch.stack([(got * factor).sum() for got, factor in zip(vectors, mine, strict=True)]).sum().backward()
    join_gradients(joined, parts)
    sums = [batch.groups[0].kernels.sum(gradients_of(batch.groups[0], 0)) for batch in (reference, joined)]
    assert torch.equal(*sums)


def test_a_part_without_gradients_counts_with_zeros() -> None:
    batch = _batch("sum", 3, 1, [4])
    whole = _begun("sum", batch)
    parts = active_parts(whole)
    first = lookup(parts[0].groups[0])
    first.sum().backward()
    late = lookup(parts[1].groups[0])
    join_gradients(whole, parts)
    ((vectors, weights, _, rows),) = whole.groups[0].gradients
    assert weights is None
    assert rows is not None
    assert torch.equal(rows, parts[0].groups[0].context.inverse)
    assert torch.equal(vectors.view(NUM_EXAMPLES, -1).sum(1), torch.tensor([18.0] * 4 + [0.0] * 5, dtype=torch.float64))
    with pytest.raises(JobError, match="after the rows of its batch were updated"):
        late.sum().backward()


def test_no_gradients_at_all_stay_none() -> None:
    whole = _begun("sum", _batch("sum", 3, 1, [4]))
    join_gradients(whole, active_parts(whole))
    assert whole.groups[0].gradients == []


def test_lookups_of_a_part_check_its_own_examples() -> None:
    batch = _batch("weighted", 3, 2, [2, 7])
    for part, own in zip(_begun("weighted", batch).context.parts, batch.parts, strict=True):
        assert part.context.num_examples == own.num_examples
        assert part.context.feature_starts == tuple(own.feature_offsets().tolist())
        assert np.array_equal(part.context.values, own.values)
