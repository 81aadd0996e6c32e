from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.types.batch import Batch
from data.columns import Columns, RowSlice, bag_starts, join, take_rows

Bags = list[list[list[int]]]  # [row][feature] -> ids
BAGS = st.integers(1, 3).flatmap(
    lambda features: st.lists(
        st.lists(st.lists(st.integers(-5, 5), max_size=3), min_size=features, max_size=features), min_size=1, max_size=8
    )
)


def columns_of(bags: Bags, weighted: bool = True) -> Columns:
    values = [value for feature in range(len(bags[0])) for row in bags for value in row[feature]]
    return Columns(
        labels=np.arange(len(bags), dtype=np.float32),
        dense=np.arange(2 * len(bags), dtype=np.float32).reshape(-1, 2),
        values=np.array(values, np.int64),
        lengths=np.array([[len(row[f]) for row in bags] for f in range(len(bags[0]))], np.int32),
        weights=np.array(values, np.float32) * 0.5 if weighted else None,
        num_raw_rows=len(bags),
        bad_rows=np.zeros(0, np.int64),
    )


def bags_of(batch: Batch | Columns) -> Bags:
    starts = bag_starts(batch.lengths)
    return [
        [
            batch.values[starts[f, row] : starts[f, row] + batch.lengths[f, row]].tolist()
            for f in range(batch.lengths.shape[0])
        ]
        for row in range(batch.labels.shape[0])
    ]


@given(BAGS, st.data())
def test_taking_rows(bags: Bags, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(bags) - 1), max_size=10))
    taken = take_rows(columns_of(bags), np.array(rows, np.int64))
    assert bags_of(taken) == [bags[row] for row in rows]
    assert taken.labels.tolist() == rows
    assert taken.weights is not None
    assert taken.weights.tolist() == (taken.values * 0.5).tolist()


@given(BAGS, st.data())
def test_joining_pieces(bags: Bags, data: st.DataObject) -> None:
    columns = columns_of(bags)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bags)), max_size=3)))
    bounds = [0, *cuts, len(bags)]
    starts = bag_starts(columns.lengths)
    pieces = [RowSlice(columns, starts, low, high) for low, high in pairwise(bounds)]
    batch = join(4, pieces)
    assert batch.index == 4
    assert bags_of(batch) == bags
    assert batch.values.tolist() == columns.values.tolist()
    assert batch.dense.tolist() == columns.dense.tolist()
    assert batch.weights is not None
    assert batch.weights.tolist() == (batch.values * 0.5).tolist()


def test_batches_are_contiguous_and_typed() -> None:
    columns = columns_of([[[1], [2]], [[], [3]], [[4], []]], weighted=False)
    batch = join(0, [RowSlice(columns, bag_starts(columns.lengths), 1, 3)])
    assert batch.weights is None
    assert batch.values.tolist() == [4, 3]
    for array, kind in ((batch.values, "i8"), (batch.lengths, "i4"), (batch.dense, "f4"), (batch.labels, "f4")):
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.dtype == np.dtype(kind)
