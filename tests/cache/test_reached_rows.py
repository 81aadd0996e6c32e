from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.cache.reached_rows import reached_rows
from bagpipe.cache.row_cache import RowCache
from bagpipe.cache.row_transfer import FetchRequests
from bagpipe.cache.upload import SlotRows
from bagpipe.kernels.interface import Gradients, RowNames, RowStep
from bagpipe.kernels.segment_sum import SegmentSum
from bagpipe.oracle.plan import RowList
from bagpipe.types.schema import RowSchema, RowTable
from tests.cache.plans import owner_plan, row_list

DIM = 4
TABLES = (RowTable(name="a", dim=DIM), RowTable(name="b", dim=DIM))
SCHEMA = RowSchema(tables=TABLES, optimizer="adam", dtype="float64", seed=3)
STEP = RowStep(lr=0.1, eps=1e-6, step=1)


def rows_of(counts: tuple[int, ...]) -> SlotRows:
    """Rows 0, 10, 20, … of each table, in descending slots."""
    lists = row_list([np.arange(count) * 10 for count in counts])
    slots = np.arange(len(lists))[::-1].astype(np.int32).copy()
    return SlotRows(
        rows=lists,
        slots=slots,
        slot_index=torch.from_numpy(slots.astype(np.int64)),
        names=RowNames(tables=torch.zeros(len(lists), dtype=torch.int32), ids=torch.from_numpy(lists.ids)),
    )


def gradients_of(vectors: list[float], num_rows: int) -> list[Gradients]:
    """Row u is the sum of vectors u and u + num_rows."""
    starts = np.arange(0, 2 * num_rows + 1, 2, dtype=np.int32)
    sources = torch.tensor([each for u in range(num_rows) for each in (u, u + num_rows)], dtype=torch.int32)
    segment_sum = SegmentSum(
        row_starts=starts, row_offsets=torch.from_numpy(starts), sources=sources, coefficients=None, occurrences=None
    )
    columns = torch.zeros(len(vectors), DIM, dtype=torch.float64)
    columns[:, 2] = torch.tensor(vectors)
    return [Gradients(vectors=columns, segment_sum=segment_sum)]


def cache_of(rows: SlotRows, **settings: Any) -> RowCache:
    cache = RowCache(SCHEMA, 8, **settings)
    nothing = row_list([np.zeros(0, np.int64)] * 2)
    new = np.ones(len(rows.rows), np.bool_)
    owner = owner_plan(rows.rows, rows.slots, nothing, np.zeros(0, np.int32), new=new)
    cache.insert(owner, FetchRequests.of(owner, skip_new=True), [])
    return cache


@pytest.mark.parametrize(
    ("vectors", "ids", "sums"),
    [
        ([1, 0, 0, 0, 0, 2, 0, 0, 0, 3], [[0], [20]], [3, 3]),
        ([1, 2, 3, 4, 5, 0, 0, 0, 0, 0], None, None),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [[], []], []),
        ([1, 1, -1, 0, 0, -1, float("nan"), 1, 0, 0], [[10], []], [float("nan")]),
    ],
    ids=["some", "all", "none", "terms that cancel, and one that is not a number"],
)
def test_rows_with_a_gradient(vectors: list[float], ids: list[list[int]] | None, sums: list[float] | None) -> None:
    rows = rows_of((2, 3))
    given = gradients_of(vectors, 5)
    kernels = cache_of(rows).kernels
    reached, gradients = reached_rows(kernels, rows, given)
    if ids is None:
        assert reached is rows
        assert gradients is given
        return
    lists: RowList = reached.rows
    first, end = lists.table_offsets[1], lists.table_offsets[2]
    assert [lists.ids[:first].tolist(), lists.ids[first:end].tolist()] == ids
    assert reached.slots.tolist() == reached.slot_index.tolist()
    assert reached.names is not None
    assert reached.names.ids.tolist() == lists.ids.tolist()
    if sums:
        np.testing.assert_array_equal(kernels.sum(gradients)[:, 2].numpy(), sums)


def test_a_row_without_a_gradient_stays_as_it_is() -> None:
    """Adam would move it: by its moments, and by the step of its bias correction."""
    rows = rows_of((2, 3))
    cache, whole = cache_of(rows, is_partial=True), cache_of(rows)
    (group, *_) = _groups()
    for each in (cache, whole):
        each.apply(group, rows, gradients_of([1, 2, 0, 0, 3, 0, 0, 0, 0, 0], 5), STEP)
    assert cache.slots.dirty[rows.slots].tolist() == [True, True, False, False, True]
    assert cache.slots.changed[rows.slots].tolist() == [True, True, False, False, True]
    assert cache.statistics().updated == 3
    ((first, second),), ((first_of_all, second_of_all),) = (list(each.flush()) for each in (cache, whole))
    np.testing.assert_array_equal(first.rows, first_of_all.rows)
    np.testing.assert_array_equal(second.rows, second_of_all.rows[[2]])
    leaving = owner_plan(row_list([np.zeros(0, np.int64)] * 2), np.zeros(0, np.int32), rows.rows, rows.slots)
    assert cache.evict(leaving) == [], "clean or written"


def _groups() -> Any:
    from bagpipe.cache.lookup_layout import TableLookup, build_layout
    from bagpipe.oracle.plan import FeatureRef

    features = tuple(FeatureRef(feature=table, table=table) for table in range(2))
    return build_layout(TABLES, features, (TableLookup(pooling="sum"),) * 2).groups
