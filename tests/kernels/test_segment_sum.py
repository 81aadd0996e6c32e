"""Chunks of long rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.kernels.segment_sum import HostSegmentSum


def sums_of(lengths: list[int]) -> HostSegmentSum:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return HostSegmentSum(row_starts=starts, sources=np.arange(starts[-1], dtype=np.int32))


def test_a_table_of_chunks() -> None:
    """Rows of 2, 7, 3 and 28 terms, three at a time: those of 7 and 28 are long."""
    long = sums_of([2, 7, 3, 28]).split(3).long
    assert long is not None
    assert long.rows.tolist() == [1, 3]
    assert (long.num_terms, long.max_terms) == (35, 3)
    terms, partial, last = [list(zip(level.starts.tolist(), level.ends.tolist(), strict=True)) for level in long.levels]
    assert terms == [(2, 5), (5, 8), (8, 9), *((12 + 3 * i, 15 + 3 * i) for i in range(9)), (39, 40)]
    assert partial == [(0, 3), (3, 6), (6, 9), (9, 12), (12, 13)]
    assert last == [(0, 1), (1, 4), (4, 5)]
    assert long.offsets.tolist() == [0, 1, 3]


@given(st.lists(st.integers(0, 200), max_size=12), st.integers(2, 40))
def test_every_term_is_summed_once_and_in_order(lengths: list[int], max_terms: int) -> None:
    sums = sums_of(lengths)
    split = sums.split(max_terms)
    assert split.sources is sums.sources  # terms are not copied
    long = split.long
    assert (long is None) == (max(lengths, default=0) <= max_terms)
    if long is None:
        return
    assert [lengths[row] for row in long.rows] == [length for length in lengths if length > max_terms]
    terms: list[list[int]] = [[place] for place in range(len(sums.sources))]
    for level in long.levels:
        sizes = level.ends - level.starts
        assert sizes.min() >= 1
        assert sizes.max() <= max_terms
        chunks = zip(level.starts, level.ends, strict=True)
        terms = [[place for part in terms[start:end] for place in part] for start, end in chunks]
    rows = zip(long.offsets[:-1], long.offsets[1:], strict=True)
    for row, (start, end) in zip(long.rows.tolist(), rows, strict=True):
        assert end - start <= max_terms
        summed = [place for part in terms[start:end] for place in part]
        assert summed == list(range(sums.row_starts[row], sums.row_starts[row + 1]))


def test_no_chunks_without_a_limit() -> None:
    sums = sums_of([1, 1000])
    assert sums.split(None) is sums
    assert sums.split(1000) is sums
