"""Distinct ids are those of `numpy.unique`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.util.distinct_ids import distinct_ids

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 9), max_size=40)


@given(st.lists(IDS, min_size=1, max_size=5))
def test_they_are_those_of_numpy(lists: list[list[int]]) -> None:
    parts = [np.array(ids, np.int64) for ids in lists]
    before = [part.copy() for part in parts]
    found = distinct_ids(parts)
    assert found.dtype == np.int64
    assert found.tolist() == np.unique(np.concatenate(parts)).tolist()
    assert all(np.array_equal(part, old) for part, old in zip(parts, before, strict=True))
