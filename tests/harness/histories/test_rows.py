"""Rows as lists of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.store.interface import ReadResult
from tests.harness.histories.rows import CAPACITY, decode, encode

NUMBERS = st.lists(st.integers(1, (1 << 24) - 1), max_size=CAPACITY)


def result_of(rows: np.ndarray, found: list[bool]) -> ReadResult:
    return ReadResult(rows, np.array(found), np.zeros(len(found), np.uint64))


@given(lists=st.lists(NUMBERS, min_size=1, max_size=3))
def test_a_list_comes_back(lists: list[list[int]]) -> None:
    ids = range(10, 10 + len(lists))
    found, torn = decode(ids, result_of(encode(lists), [True] * len(lists)))
    assert found == {row: tuple(numbers) for row, numbers in zip(ids, lists, strict=True)}
    assert torn == []


def test_a_row_that_is_not_there_is_empty() -> None:
    assert decode([5], result_of(np.zeros((1, CAPACITY + 2), np.float32), [False])) == ({5: ()}, [])


@given(old=NUMBERS, new=NUMBERS, cut=st.integers(1, CAPACITY + 1))
def test_a_row_of_two_writes_is_torn(old: list[int], new: list[int], cut: int) -> None:
    one, two = encode([old, new])
    mixed = np.concatenate([one[:cut], two[cut:]])
    lists, torn = decode([0], result_of(mixed[None], [True]))
    is_whole = mixed.tobytes() in (one.tobytes(), two.tobytes())
    assert (lists, torn) == (
        ({0: tuple(old if mixed.tobytes() == one.tobytes() else new)}, []) if is_whole else ({}, [0])
    )


@pytest.mark.parametrize("numbers", [[0], [1 << 24], [1] * (CAPACITY + 1)])
def test_what_a_row_cannot_hold(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="expected at most 126 numbers from 1 to 16777215"):
        encode([numbers])
