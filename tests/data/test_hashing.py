from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.types.schema import Table
from data.hashing import hash_ids, mix64, place_ids, range_reason, scramble40

WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50)


def mix_slowly(word: int) -> int:
    mask = 2**64 - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


@given(WORDS)
def test_mix_is_splitmix64(words: list[int]) -> None:
    assert mix64(np.array(words, np.uint64)).tolist() == [mix_slowly(word) for word in words]


# The first is the published first output of SplitMix64 seeded with 0. These numbers are part of the data format.
GOLDEN_MIX = {0: 0xE220A8397B1DCDAF, 1: 0x910A2DEC89025CC1, 2**64 - 1: 0xE4D971771B652C20}
GOLDEN_BUCKETS = {0: 35, 1: 65, 2: 10, -1: 36, 2**63 - 1: 39, -(2**63): 15}


def test_golden_words() -> None:
    words = np.array(list(GOLDEN_MIX), np.uint64)
    assert dict(zip(GOLDEN_MIX, mix64(words).tolist(), strict=True)) == GOLDEN_MIX


def test_golden_buckets() -> None:
    ids = np.array(list(GOLDEN_BUCKETS), np.int64)
    assert dict(zip(GOLDEN_BUCKETS, hash_ids(ids, 100).tolist(), strict=True)) == GOLDEN_BUCKETS


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), st.integers(1, 2**62))
def test_buckets_lie_in_the_table(ids: list[int], rows: int) -> None:
    buckets = hash_ids(np.array(ids, np.int64), rows)
    assert buckets.dtype == np.int64
    assert ((buckets >= 0) & (buckets < rows)).all()


@pytest.mark.parametrize("salt", [0, 1, 123456789])
def test_scramble_is_a_bijection(salt: int) -> None:
    ranks = np.concatenate([np.arange(100_000), 2**40 - 1 - np.arange(100_000)])
    ids = scramble40(ranks, salt)
    assert np.unique(ids).size == ranks.size
    assert ids.min() >= 0
    assert ids.max() < 2**40


@pytest.mark.parametrize(
    ("table", "outside"),
    [
        (Table(name="t"), []),
        (Table(name="t", rows=8, hash=True), []),
        (Table(name="t", rows=10), []),
        (Table(name="t", rows=9), [3]),
        (Table(name="t", rows=4), [2, 3]),
    ],
)
def test_ids_outside_their_table(table: Table, outside: list[int]) -> None:
    ids = np.array([0, 3, 8, 9], np.int64)
    placed, found = place_ids(ids, table)
    assert found.tolist() == outside
    assert placed.tolist() == (hash_ids(ids, 8).tolist() if table.hash else [0, 3, 8, 9])
    assert place_ids(ids[:0], table)[1].size == 0
    present = np.array([True, True, True, False])
    assert place_ids(ids, table, present)[1].tolist() == [place for place in outside if place < 3]


def test_an_id_outside_is_shown_as_it_was_written() -> None:
    reason = range_reason(Table(name="t", rows=4), -1)
    assert reason == "expected ids of table 't' in [0, 4), got -1 (18446744073709551615 as an unsigned number)"
    assert range_reason(Table(name="t", rows=4), 2**63 - 1).endswith(f"got {2**63 - 1}")
