from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.types.splitmix64 import GOLDEN, mix, mix_rows

MASK = 2**64 - 1
WORDS = st.lists(st.integers(0, MASK), min_size=1, max_size=50)


def mix_slowly(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


@given(WORDS)
def test_words_are_mixed_in_place(words: list[int]) -> None:
    given_words = np.array(words, np.uint64)
    assert mix(given_words) is given_words
    assert given_words.tolist() == [mix_slowly(word) for word in words]


def test_the_published_sequence() -> None:
    """The first outputs of SplitMix64 seeded with 0."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(np.arange(1, 4, dtype=np.uint64) * GOLDEN).tolist() == expected
    assert mix(np.zeros(1, np.uint64)).tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 2**15 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=50))
def test_rows_of_any_table_and_byte_order(rows: list[tuple[int, int]]) -> None:
    tables, ids = (np.array(numbers) for numbers in zip(*rows, strict=True))
    expected = [mix_slowly(row_id + (table + 1) * int(GOLDEN) & MASK) for table, row_id in rows]
    for table_type, id_type in (("int16", "int64"), ("uint32", "int64"), (">u4", ">i8")):
        assert mix_rows(tables.astype(table_type), ids.astype(id_type)).tolist() == expected
    assert mix_rows(tables[:1], ids).tolist() == mix_rows(np.repeat(tables[:1], len(ids)), ids).tolist()
    assert ids.tolist() == [row_id for _, row_id in rows]
