"""`derived_context`: of the planned ids it is the planned context; of other ids the definition holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bagpipe.cache.batch_context import GroupContext, prepare_batch
from bagpipe.cache.derived_lookup import derived_context
from bagpipe.cache.lookup_layout import Pooling, TableLookup, build_layout
from bagpipe.cache.upload import Uploader
from bagpipe.errors import InputError
from bagpipe.oracle.plan import FeatureRef
from bagpipe.types.batch import Batch
from bagpipe.types.schema import RowTable
from tests.cache.plans import consumer_plan, random_batch
from tests.effort import at_most

#: Tables of three features; the second one has two of them, and is looked up for both.
TABLES = (0, 1, 1)
UPLOAD = Uploader(torch.device("cpu"), torch.float64)


def _planned(batch: Batch, pooling: Pooling = "sum", *, weighted: bool = False) -> GroupContext:
    tables = [RowTable(name="a", dim=4), RowTable(name="b", dim=4)]
    features = [FeatureRef(feature=feature, table=table) for feature, table in enumerate(TABLES)]
    layout = build_layout(tables, features, [TableLookup(pooling=pooling, weighted=weighted)] * 2)
    plan = consumer_plan(batch, layout.features, 2, lambda n: np.arange(n, dtype=np.int32))
    (group,) = prepare_batch(layout, batch, plan, upload=UPLOAD).groups
    return group


def _derived(group: GroupContext, ids: list[Any], lengths: Any) -> GroupContext:
    made = [np.array(own, np.int64) for own in ids]
    return derived_context(group, TABLES, ("x", "y", "z"), made, np.array(lengths, np.int32), UPLOAD)


def _arrays(group: GroupContext) -> list[Tensor | None]:
    (sums,) = group.backward
    return [
        group.inverse, group.bag_offsets, group.bag_order, group.bags, torch.tensor(group.segment_sizes),
        torch.from_numpy(sums.row_starts), sums.row_offsets, sums.sources, sums.coefficients, sums.occurrences,
    ]  # fmt: skip


@at_most(30)
@given(
    st.integers(0, 2**20),
    st.sampled_from([("sum", False), ("sum", True), ("mean", False), ("none", False)]),
    st.booleans(),
    st.booleans(),
)
def test_the_planned_ids_give_the_planned_context(
    seed: int, kind: tuple[Pooling, bool], one_hot: bool, negative: bool
) -> None:
    batch = random_batch(
        np.random.default_rng(seed),
        num_examples=5,
        num_ids=(9, 9, 9),
        min_length=int(one_hot),
        max_length=1 + 2 * (not one_hot),
    )
    if negative:
        batch.values[::2] *= -(2**61)
    planned = _planned(batch, kind[0], weighted=kind[1])
    derived = _derived(planned, np.split(batch.values, batch.feature_offsets()[1:-1]), batch.lengths)
    for ours, theirs in zip(_arrays(derived), _arrays(planned), strict=True):
        assert ours is theirs is None or torch.equal(*(x for x in (ours, theirs) if x is not None))


def test_ids_of_another_feature_of_the_table_are_rows_of_the_batch() -> None:
    batch = random_batch(np.random.default_rng(0), num_examples=2, num_ids=(5, 5, 5), min_length=1, max_length=1)
    batch.values[:] = [1, 2, 3, 4, 5, 6]
    derived = _derived(_planned(batch), [[], [6], [3, 4, 4]], [[0], [1], [3]])
    assert derived.inverse.tolist() == [5, 2, 3, 3]
    assert derived.segment_sizes == (0, 1, 3)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([[3], [], []], "id 3 for feature 'x', which is none of the batch's 2 ids of its table"),
        ([[1], [], [5, -(2**63)]], "id -9223372036854775808 for feature 'z', which is none of the batch's 4 ids"),
    ],
)
def test_other_ids_are_refused(ids: list[list[int]], text: str) -> None:
    batch = random_batch(np.random.default_rng(0), num_examples=2, num_ids=(5, 5, 5), min_length=1, max_length=1)
    batch.values[:] = [1, 2, 3, 4, 5, 6]
    with pytest.raises(InputError, match=text):
        _derived(_planned(batch), ids, [[len(own)] for own in ids])


def test_a_batch_without_rows_has_none() -> None:
    batch = random_batch(np.random.default_rng(0), num_examples=2, num_ids=(5, 5, 5), max_length=0)
    assert _derived(_planned(batch), [[], [], []], np.zeros((3, 7))).inverse.tolist() == []
    with pytest.raises(InputError, match="none of the batch's 0 ids"):
        _derived(_planned(batch), [[7], [], []], [[1], [0], [0]])
