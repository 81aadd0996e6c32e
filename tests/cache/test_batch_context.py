"""Plan to index tensors: readable golden tables, and the definition on random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache.batch_context import GroupContext, prepare_batch
from bagpipe.cache.lookup_layout import LookupLayout, TableLookup, build_layout
from bagpipe.cache.upload import Uploader
from bagpipe.errors import JobError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowTable
from tests.cache.plans import consumer_plan, random_batch
from tests.effort import at_most

CPU = torch.device("cpu")


def slots(num_rows: int) -> np.ndarray:
    return np.arange(num_rows, dtype=np.int32)


def layout_of(segment_tables: list[int], lookup: TableLookup) -> LookupLayout:
    tables = [RowTable(name=str(table), dim=4) for table in range(max(segment_tables) + 1)]
    features = [FeatureRef(feature=feature, table=table) for feature, table in enumerate(segment_tables)]
    return build_layout(tables, features, [lookup] * len(tables))


def prepare(batch: Batch, layout: LookupLayout) -> GroupContext:
    plan = consumer_plan(batch, layout.features, 1 + max(ref.table for ref in layout.features), slots)
    (group,) = prepare_batch(layout, batch, plan, upload=Uploader(CPU, torch.float64)).groups
    return group


def make_batch(lengths: list[list[int]], values: list[int]) -> Batch:
    num_examples = len(lengths[0])
    return Batch(
        index=0,
        dense=np.zeros((num_examples, 0), dtype=np.float32),
        values=np.array(values, dtype=np.int64),
        lengths=np.array(lengths, dtype=np.int32),
        labels=np.zeros(num_examples, dtype=np.float32),
    )


def test_golden_multi_hot() -> None:
    """Two features of one table, three examples.

    occurrence    0   1   2   3   4   5
    feature       f0  f0  f0  f1  f1  f1
    example       0   0   2   0   1   1
    id            7   5   7   5   5   9        unique rows: 5 7 9
    bag           0   0   4   1   3   3        = example * 2 + feature
    """
    batch = make_batch([[2, 0, 1], [1, 2, 0]], [7, 5, 7, 5, 5, 9])
    group = prepare(batch, layout_of([0, 0], TableLookup(pooling="mean")))
    assert group.local.rows.ids.tolist() == [5, 7, 9]
    assert group.inverse.tolist() == [1, 0, 0, 0, 2, 1]  # example by example
    assert group.bag_offsets is not None
    assert group.bag_offsets.tolist() == [0, 2, 3, 3, 5, 6, 6]
    assert group.backward[0].row_offsets.tolist() == [0, 3, 5, 6]
    assert group.backward[0].sources.tolist() == [0, 1, 3, 0, 4, 3]  # bags of row 5, of row 7, of row 9
    assert group.backward[0].coefficients is not None
    assert group.backward[0].coefficients.tolist() == [0.5, 1.0, 0.5, 0.5, 1.0, 0.5]
    assert group.segment_sizes == (3, 3)


def test_golden_one_hot() -> None:
    """One id in every bag: no offsets, positions transposed."""
    batch = make_batch([[1, 1, 1], [1, 1, 1]], [4, 6, 4, 4, 4, 8])
    group = prepare(batch, layout_of([0, 0], TableLookup()))
    assert group.local.rows.ids.tolist() == [4, 6, 8]
    assert group.inverse.tolist() == [0, 0, 1, 0, 0, 2]
    assert group.bag_offsets is None
    assert group.backward[0].sources.tolist() == [0, 4, 1, 3, 2, 5]
    assert group.backward[0].row_offsets.tolist() == [0, 4, 5, 6]


def test_indices_of_the_second_group_start_at_zero() -> None:
    batch = make_batch([[1, 1], [2, 0]], [3, 3, 1, 2])
    tables = [RowTable(name="a", dim=4), RowTable(name="b", dim=8)]
    features = [FeatureRef(feature=0, table=0), FeatureRef(feature=1, table=1)]
    layout = build_layout(tables, features, [TableLookup(), TableLookup(pooling="none")])
    plan = consumer_plan(batch, layout.features, 2, slots)
    context = prepare_batch(layout, batch, plan, upload=Uploader(CPU, torch.float32))
    second = context.groups[1]
    assert (second.local.rows.table_offsets.tolist(), second.local.rows.ids.tolist()) == ([0, 0, 2], [1, 2])
    assert second.local.slots.tolist() == [1, 2]
    assert second.inverse.tolist() == second.backward[0].sources.tolist() == [0, 1]
    assert second.backward[0].row_offsets.tolist() == [0, 1, 2]
    assert context.feature_starts == (0, 2, 4)


@at_most(30)
@given(
    seed=st.integers(0, 2**32),
    num_examples=st.integers(1, 7),
    segment_tables=st.lists(st.integers(0, 2), min_size=1, max_size=5).map(sorted),
    max_length=st.integers(1, 4),
    min_length=st.integers(0, 1),
    pooling=st.sampled_from(["sum", "mean", "weighted"]),
)
def test_definition(
    seed: int, num_examples: int, segment_tables: list[int], max_length: int, min_length: int, pooling: str
) -> None:
    """Every (bag, row) pair of the batch appears once in the forward and once in the backward indices."""
    rng = np.random.default_rng(seed)
    batch = random_batch(
        rng,
        num_examples=num_examples,
        num_ids=[6] * len(segment_tables),
        max_length=max_length,
        min_length=min_length,
    )
    lookup = TableLookup(weighted=True)
    if pooling != "weighted":
        lookup = TableLookup(pooling=pooling)  # type: ignore[arg-type]
    layout = layout_of(segment_tables, lookup)
    group = prepare(batch, layout)
    bag_of = np.repeat(np.arange(batch.lengths.size).reshape(num_examples, -1).T.reshape(-1), batch.lengths.reshape(-1))
    num_bags = batch.lengths.size
    forward_bags = np.arange(num_bags)
    if group.bag_offsets is not None:
        forward_bags = np.repeat(forward_bags, np.diff(group.bag_offsets.numpy()))
    pairs = sorted(zip(forward_bags.tolist(), group.inverse.tolist(), strict=True))
    rows = np.repeat(np.arange(group.num_rows), np.diff(group.backward[0].row_offsets.numpy()))
    assert pairs == sorted(zip(group.backward[0].sources.tolist(), rows.tolist(), strict=True))
    row_tables = np.repeat(np.arange(len(group.local.rows.table_offsets) - 1), np.diff(group.local.rows.table_offsets))
    expected = sorted(zip(bag_of.tolist(), batch.values.tolist(), strict=True))
    looked_up = group.local.rows.ids[group.inverse.numpy()]
    assert sorted(zip(forward_bags.tolist(), looked_up.tolist(), strict=True)) == expected
    for bag, row in pairs:
        assert row_tables[row] == segment_tables[bag % len(segment_tables)]
    if group.bag_order is not None and group.backward[0].occurrences is not None and group.bags is not None:
        assert bag_of[group.bag_order.numpy()].tolist() == forward_bags.tolist() == group.bags.tolist()
        assert bag_of[group.backward[0].occurrences.numpy()].tolist() == group.backward[0].sources.tolist()


def test_plan_of_another_batch() -> None:
    layout = layout_of([0], TableLookup())
    plan = consumer_plan(make_batch([[1, 1]], [3, 4]), layout.features, 1, slots)
    with pytest.raises(JobError, match="the plan has 2 id occurrences, the batch has 3"):
        prepare_batch(layout, make_batch([[1, 2]], [3, 4, 5]), plan, upload=Uploader(CPU, torch.float32))
