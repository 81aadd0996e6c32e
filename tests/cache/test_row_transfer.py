"""Copies of rows into and out of slots: direct and staged copies give the same records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bagpipe.cache.row_transfer import RowTransfer
from bagpipe.cache.slots import Slab
from bagpipe.errors import JobError
from bagpipe.kernels.initialization import initial_weights
from bagpipe.kernels.select import select_kernels
from bagpipe.oracle.plan import RowList
from bagpipe.pipeline.stream import NullStreams, Streams
from bagpipe.store.interface import ReadResult
from bagpipe.store.validation import row_dtype
from bagpipe.testing.recording_streams import RecordingStreams
from bagpipe.types.schema import RowSchema, RowTable

CPU = torch.device("cpu")
#: Two widths: tables 0 and 1 share a slab.
SCHEMA = RowSchema(
    tables=tuple(RowTable(name=f"t{n}", dim=dim, rows=None, init_bound=0.1) for n, dim in enumerate((4, 4, 8))),
    optimizer="adagrad",
)
ROWS = RowList(table_offsets=np.array([0, 2, 3, 5]), ids=np.array([5, 6, 5, 1, 2]))
SLOTS = np.array([9, 3, 0, 7, 1], dtype=np.int32)
NO_WORDS = np.empty(0, np.uint64)  # the transfer does not look at check words


class Half:
    """A slab with rows, three of them from the store."""

    def __init__(self, streams: Streams) -> None:
        self.slab = Slab(10, 64, CPU)
        self.records = self.slab.records(torch.float32).zero_()
        self.transfer = RowTransfer(SCHEMA, self.slab, streams, CPU, prefetch_depth=2)
        found = np.array([True, False, True, True, False])
        results = {
            0: ReadResult(np.arange(16, dtype=np.float32).reshape(2, 8), np.array([True, False]), NO_WORDS),
            1: ReadResult(np.full((1, 8), 3, np.float32), np.array([True]), NO_WORDS),
            # The other row was not requested.
            2: ReadResult(np.full((1, 16), 4, np.float32), np.array([True]), NO_WORDS),
        }
        self.transfer.put(select_kernels(SCHEMA, CPU), ROWS, SLOTS, found, results)


@pytest.fixture(params=[NullStreams, RecordingStreams])
def half(request: pytest.FixtureRequest) -> Half:
    return Half(request.param())


def test_rows_are_put_where_the_plan_says(half: Half) -> None:
    records = half.records
    assert records[9, :8].tolist() == list(range(8))
    assert records[0, :8].tolist() == [3] * 8
    assert records[7].tolist() == [4] * 16
    for slot, dim in ((3, 4), (1, 8)):  # initial weights, state of zeros
        assert records[slot, :dim].abs().max() <= 0.1
        assert records[slot, :dim].all()
        assert not records[slot, dim:].any()
    assert not records[[2, 4, 5, 6, 8]].any()


def test_staging_changes_no_bit() -> None:
    assert torch.equal(Half(NullStreams()).records, Half(RecordingStreams()).records)


def test_evicted_records_are_unchanged(half: Half) -> None:
    copied = half.transfer.copy_out(ROWS, SLOTS)
    expected = half.records.clone()
    half.records.fill_(-1)  # their slots belong to other rows now
    for _ in range(2):  # the store's copy and a journal's
        requests = copied()
        assert [(request.table, request.ids.tolist()) for request in requests] == [(0, [5, 6]), (1, [5]), (2, [1, 2])]
        for request, slots, width in zip(requests, ([9, 3], [0], [7, 1]), (8, 8, 16), strict=True):
            np.testing.assert_array_equal(request.rows, expected[slots, :width].numpy())


def test_empty_transfers_do_no_work() -> None:
    streams = RecordingStreams()
    half = Half(streams)
    before = list(streams.log)
    nothing = RowList(table_offsets=np.zeros(4, np.int64), ids=np.zeros(0, np.int64))
    half.transfer.put(select_kernels(SCHEMA, CPU), nothing, SLOTS[:0], np.zeros(0, np.bool_), {})
    assert half.transfer.copy_out(nothing, SLOTS[:0])() == []
    assert streams.log == before


@pytest.mark.parametrize("streams", [NullStreams, RecordingStreams])
def test_records_of_several_dtypes_keep_their_bits(streams: Any) -> None:
    """Tables of one dimension, whose records have different words."""
    tables = tuple(replace(SCHEMA.tables[0], name=name, dtype=name) for name in ("float32", "float16", "bfloat16"))
    schema = RowSchema(tables=tables, optimizer="adagrad")
    random = np.random.default_rng(0)
    rows = RowList(table_offsets=np.array([0, 2, 4, 6]), ids=np.array([1, 2] * 3))
    stored = [
        random.integers(0, 256, (2, schema.row_bytes(table)), np.uint8).view(row_dtype(schema, table))
        for table in range(3)
    ]
    results = {
        table: ReadResult(words, np.array([True, True]), NO_WORDS) for table, words in enumerate(stored) if table != 1
    }
    transfer = RowTransfer(schema, slab := Slab(6, schema.row_bytes(0), CPU), streams(), CPU, prefetch_depth=2)
    slots = np.array([5, 0, 3, 1, 4, 2], dtype=np.int32)
    found = np.array([True, True, False, False, True, True])
    transfer.put(select_kernels(schema, CPU), rows, slots, found, results)
    requests = transfer.copy_out(rows, slots)()
    assert [request.rows.dtype for request in requests] == [words.dtype for words in stored]
    assert [requests[table].rows.tobytes() for table in (0, 2)] == [stored[table].tobytes() for table in (0, 2)]
    weights = slab.records(torch.float16)[[3, 1], :4]
    expected = initial_weights(tables[1], np.array([1, 2]), seed=schema.seed, dtype="float16")
    assert torch.equal(weights, expected)
    assert not requests[1].rows[:, 4:].any()


def test_a_row_that_is_not_finite_is_named_before_it_leaves(half: Half) -> None:
    half.records[7, 10] = float("nan")  # state
    with pytest.raises(JobError, match="table t2 id 1: an update made weights or state of the row that are not finite"):
        half.transfer.copy_out(ROWS, SLOTS)()
    half.records[3, 0] = float("-inf")
    with pytest.raises(JobError, match=r"table t0 id 6: .* not finite in float32; it is not stored"):
        half.transfer.copy_out(ROWS, SLOTS)()
    requests = half.transfer.copy_out(ROWS, SLOTS, checks=False)()  # to be read, not stored
    assert np.isneginf(requests[0].rows[1, 0])
