"""Rows read for evaluations at rest are those that a flush would have written, whatever is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bagpipe.cache.lookup import lookup
from bagpipe.kernels.interface import RowStep
from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.training.current_rows import KEPT_BYTES, CurrentRows
from tests.cache.plans import DictStore
from tests.cache.test_row_cache import NUM_IDS, batches, loss_of, new_job


class WatchedStore(DictStore):
    """Tells a part of the writes, and counts the rows read for evaluations."""

    part: CurrentRows
    num_read = 0
    is_evaluating = False

    def read_many(self, requests: Sequence[tuple[int, NDArray[np.int64]]]) -> list[ReadResult]:
        if self.is_evaluating:
            self.num_read += sum(len(ids) for _, ids in requests)
        return super().read_many(requests)

    def write_many(self, requests: Sequence[WriteRequest]) -> None:
        super().write_many(requests)
        self.part.after_write(requests, 0, 0)


def flushed(job: Any) -> dict[tuple[int, int], NDArray[Any]]:
    """The rows of the store after a flush, which is not made."""
    rows = dict(job.store.rows)
    for request in next(job.cache.flush(chunk_rows=10_000), ()):
        rows |= {(request.table, row_id): row for row_id, row in zip(request.ids.tolist(), request.rows, strict=True)}
    return rows


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("kept_bytes", "dtype"), [(0, "float64"), (300, "float64"), (KEPT_BYTES, "mixed")])
def test_evaluations_read_what_a_flush_writes(kept_bytes: int, dtype: str, seed: int) -> None:
    """Before an update too, when rows of the batch that no batch has trained are in the cache: they are not found."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(0, 10, 8).tolist()
    job = new_job("adagrad", dtype)
    job.store = store = WatchedStore(job.cache.schema)
    store.part = part = CurrentRows(kept_bytes)
    held_out = [np.flatnonzero(rng.random(limit + 2) < 0.7).astype(np.int64) for limit in NUM_IDS]
    num_ahead = 0

    def evaluate(count: int) -> None:
        nonlocal num_ahead
        for _ in range(count):
            expected = flushed(job)
            num_ahead += job.cache.slots.num_resident - len(job.cache.slots.existing_slots())
            store.is_evaluating = True
            with part.reading(job.cache, store) as reader:  # type: ignore[arg-type]
                for _ in range(2):
                    chosen = [(table, ids) for table, ids in enumerate(held_out) if len(ids) and rng.random() < 0.8]
                    for (table, ids), result in zip(chosen, reader.read_many(chosen), strict=True):
                        _check(expected, table, ids, result)
            store.is_evaluating = False

    for context in job.steps(batches(max(steps) + 1, seed)):
        evaluate(int(rng.integers(2)))
        current = job.cache.current
        assert current is not None
        loss_of([lookup(group) for group in current.groups]).backward()
        job.cache.update(context, RowStep(lr=0.1, eps=1e-6, step=context.batch_index + 1))
        evaluate(steps.count(context.batch_index))
    assert num_ahead


def _check(expected: dict[Any, Any], table: int, ids: NDArray[np.int64], result: ReadResult) -> None:
    for row_id, row, found in zip(ids.tolist(), result.rows, result.found, strict=True):
        assert found == ((table, row_id) in expected)
        if found:
            assert row.tobytes() == expected[table, row_id].tobytes()


def test_rows_that_nobody_wrote_are_read_once() -> None:
    job = new_job("sgd")
    job.store = store = WatchedStore(job.cache.schema)
    store.part = part = CurrentRows()
    store.is_evaluating = True
    requests = [(0, np.arange(4)), (3, np.arange(5))]
    for _ in range(3):
        with part.reading(job.cache, store) as reader:  # type: ignore[arg-type]
            reader.read_many(requests)
    assert store.num_read == 9
