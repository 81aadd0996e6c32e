"""Positions in the data by batch number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacher.reader_states import ReaderStates


@pytest.mark.parametrize(("batch", "found"), [(0, None), (15, None), (16, 16), (40, 32), (48, 48), (1000, 48)])
def test_the_nearest_one_before(batch: int, found: int | None) -> None:
    reader_states = ReaderStates(every=16)
    for number in (16, 32, 48):
        assert reader_states.wants(number)
        reader_states.add(number, {"batch": number})
    assert reader_states.before(batch) == (None if found is None else {"batch": found})


@given(st.integers(1, 3), st.integers(0, 9000))
def test_memory_is_bounded_and_the_way_from_a_bookmark_short(every: int, count: int) -> None:
    reader_states = ReaderStates(every=every)
    for number in range(1, count):
        if reader_states.wants(number):
            reader_states.add(number, {"batch": number})
    assert len(reader_states) <= 1024
    found = reader_states.before(count)
    assert count - (found["batch"] if found else 0) <= every * 2 ** (max(1, count // every // 512)).bit_length()
