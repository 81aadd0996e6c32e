"""`WrittenRows`: exactly the rows that were written in the epochs it remembers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.checkpoint.written import WrittenRows

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 30), max_size=40)


@given(
    batches=st.lists(st.tuples(st.integers(0, 2), IDS), max_size=60),
    epochs=st.lists(st.integers(0, 1), min_size=60, max_size=60),
    forgotten=st.integers(0, 20),
    asked=IDS,
)
def test_what_was_written(
    batches: list[tuple[int, list[int]]], epochs: list[int], forgotten: int, asked: list[int]
) -> None:
    written, model = WrittenRows(), []
    epoch = 1
    for (table, ids), later in zip(batches, epochs, strict=False):
        epoch += later
        written.add(epoch, table, np.array(ids, np.int64))
        model += [(epoch, table, row) for row in ids]
    written.forget(forgotten)
    known = {(table, row) for number, table, row in model if number > forgotten}
    every = np.array([*asked, *(row for _, _, row in model)], np.int64)
    for table in range(3):
        assert written.contains(table, every).tolist() == [(table, row) in known for row in every.tolist()]


def test_the_oldest_epochs_go_first() -> None:
    written = WrittenRows(max_rows=100)
    for epoch in range(1, 5):
        for _ in range(3):
            written.add(epoch, 0, np.arange(40, dtype=np.int64) + 40 * epoch)
    found = written.contains(0, np.arange(200, dtype=np.int64))
    assert np.flatnonzero(found).tolist() == list(range(120, 200)), "two epochs of 40 rows each"
