"""Layouts of flat buffers: every element has one owner, shares are equal, and the formulas are those of ZeRO."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.dense.parallel.shard_layout import ALIGNMENT, flat_layout, kept_bytes, sent_bytes

SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=8)
RANKS = st.integers(2, 9)


@given(SIZES, RANKS)
def test_each_element_is_in_one_share(sizes: list[int], num_ranks: int) -> None:
    layout = flat_layout(sizes, num_ranks)
    assert layout.length == num_ranks * layout.share
    assert layout.length < sum(sizes) + ALIGNMENT * len(sizes) + num_ranks
    ends = [0] * len(sizes)
    for rank in range(num_ranks):
        for number, segment in enumerate(layout.segments(rank)):
            assert 0 <= segment.offset <= segment.offset + segment.length <= layout.share
            if segment.length:
                assert segment.first == ends[number], "runs of elements in the order of the ranks"
                assert layout.starts[number] + segment.first == rank * layout.share + segment.offset
                ends[number] = segment.end
    assert ends == sizes


@given(SIZES, RANKS)
def test_parameters_begin_where_allocations_could(sizes: list[int], num_ranks: int) -> None:
    layout = flat_layout(sizes, num_ranks)
    assert all(start % ALIGNMENT == 0 for start in layout.starts)
    for start, size, after in zip(layout.starts, sizes, layout.starts[1:], strict=False):
        assert start + size <= after < start + size + ALIGNMENT


def test_one_rank_divides_nothing() -> None:
    with pytest.raises(ValueError, match="expected at least 2 ranks, got 1"):
        flat_layout([3], 1)


def test_adam_in_float32_keeps_16_bytes_of_a_parameter() -> None:
    """ZeRO's table with 4 ranks: 16, 4 + 4 + 8/4, 4 + 4/4 + 8/4, 16/4 bytes; sent: 2, 2, 2, 3 times 3/4 of 4 bytes."""
    levels = ("none", "optimizer", "gradients", "parameters")
    assert [kept_bytes(level, 1000, 4, itemsize=4, states=2).total for level in levels] == [16e3, 10e3, 7e3, 4e3]
    assert [sent_bytes(level, 1000, 4, itemsize=4) for level in levels] == [6e3, 6e3, 6e3, 9e3]
    whole = kept_bytes("none", 1000, 4, itemsize=4, states=2)
    assert (whole.parameters, whole.gradients, whole.state) == (4e3, 4e3, 8e3)
