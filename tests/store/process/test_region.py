"""Layout and arrays of an exchange: every row once, in order, within the region, and back bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.interface import ReadResult, WriteRequest
from bagpipe.store.process.region import Layout, Region
from bagpipe.types.schema import RowSchema, RowTable

SCHEMA = RowSchema(
    tables=(
        RowTable(name="narrow", dim=1),
        RowTable(name="wide", dim=16),
        RowTable(name="half", dim=3, dtype="float16"),
    ),
    optimizer="adagrad",
)
#: Table and number of rows of each request.
requests = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=8)


def end_of(layout: Layout, region: Region) -> int:
    """Bytes that an exchange takes."""
    start = region.memory.ctypes.data
    return (
        max([region.found.ctypes.data + region.found.nbytes, *(r.ctypes.data + r.nbytes for r in region.rows())])
        - start
    )


@given(requests, st.integers(600, 4000))
def test_exchanges_hold_every_row_once_in_order(asked, region_bytes):
    layout = Layout(SCHEMA, region_bytes)
    exchanges = list(layout.exchanges([table for table, _ in asked], [count for _, count in asked]))
    rows = [(piece.request, row) for pieces in exchanges for piece in pieces for row in range(piece.start, piece.stop)]
    assert rows == [(request, row) for request, (_, count) in enumerate(asked) for row in range(count)]
    for pieces in exchanges:
        entries = [(asked[piece.request][0], piece.stop - piece.start, False) for piece in pieces]
        region = Region(layout, np.zeros(region_bytes, np.uint8), entries)
        assert end_of(layout, region) <= region_bytes


@given(requests)
def test_one_exchange_has_every_request_if_it_fits(asked):
    layout = Layout(SCHEMA, 1 << 20)
    [pieces] = layout.exchanges([table for table, _ in asked], [count for _, count in asked])
    assert [(piece.request, piece.start, piece.stop) for piece in pieces] == [
        (request, 0, count) for request, (_, count) in enumerate(asked)
    ]


def test_a_region_smaller_than_a_row_is_refused():
    with pytest.raises(ValueError, match="a region of 400 bytes holds no row of"):
        Layout(SCHEMA, 400)


@given(requests, st.integers(0, 2**32 - 1))
def test_writes_and_results_come_back_bit_for_bit(asked, seed):
    rng = np.random.default_rng(seed)
    layout = Layout(SCHEMA, 1 << 20)
    memory = np.zeros(1 << 20, np.uint8)

    def rows_of(table: int, count: int) -> np.ndarray:
        words = rng.integers(0, 256, (count, int(layout.row_bytes[table])), np.uint8)
        return words.view(layout.dtypes[table])

    writes = [
        WriteRequest(
            table,
            rng.integers(-(1 << 62), 1 << 62, count),
            rows_of(table, count),
            rng.integers(0, 1 << 63, count).astype(np.uint64) if rng.random() < 0.5 else None,
        )
        for table, count in asked
    ]
    entries = [(write.table, len(write.ids), write.replaced is not None) for write in writes]
    Region(layout, memory, entries).put_writes(writes)
    for sent, came in zip(writes, Region(layout, memory, len(entries)).writes(), strict=True):
        assert came.table == sent.table
        assert came.ids.tolist() == sent.ids.tolist()
        assert came.rows.tobytes() == sent.rows.tobytes()
        assert (came.replaced is None) == (sent.replaced is None)
        assert came.replaced is None or came.replaced.tolist() == sent.replaced.tolist()

    results = [
        ReadResult(rows_of(table, count), rng.random(count) < 0.5, rng.integers(0, 1 << 63, count).astype(np.uint64))
        for table, count in asked
    ]
    Region(layout, memory, entries).put_results(results)
    for sent, came in zip(results, Region(layout, memory, len(entries)).results(), strict=True):
        assert came.rows.tobytes() == sent.rows.tobytes()
        assert came.found.tolist() == sent.found.tolist()
        assert came.checks.tolist() == sent.checks.tolist()
