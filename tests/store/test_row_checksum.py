from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bagpipe.store.row_checksum import CHECK_BYTES, check_words, value_dtype

TABLES, IDS = np.array([0, 0, 1, 7], np.uint32), np.array([0, -1, 5, 2**40], np.int64)


def voids(raw: NDArray[np.uint8]) -> NDArray[np.void]:
    return np.ascontiguousarray(raw).view(f"V{raw.shape[1]}").reshape(-1)


def plain_check_word(table: int, row_id: int, record: bytes) -> int:
    """The formula, one row at a time."""

    def multiplier(number: int) -> int:
        mask = 2**64 - 1
        word = (number + 1) * 0x9E3779B97F4A7C15 & mask
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        return (word ^ word >> 31) | 1

    words = [int.from_bytes(record[start : start + 4], "little") for start in range(0, len(record), 4)]
    total = multiplier(0) + table * multiplier(1) + row_id * multiplier(2)
    return (total + sum(word * multiplier(number) for number, word in enumerate(words, 3))) % 2**64


# Part of the stored format: a change makes stored rows unreadable.
GOLDEN = [0x0C423F9DA9E1EE73, 0xAEF1F73DCFD93E88, 0xEF78D8F417CAD9BB, 0x173021B207F57852]


def test_check_words_never_change() -> None:
    raw = np.arange(48, dtype=np.uint8).reshape(4, 12)
    words = check_words(TABLES, IDS, voids(raw)).tolist()
    assert words == [plain_check_word(*of) for of in zip(TABLES.tolist(), IDS.tolist(), map(bytes, raw), strict=True)]
    assert words == GOLDEN


@pytest.mark.parametrize("row_bytes", [4, 8, 12, 128, 260, 4096])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_every_width(row_bytes: int, num_rows: int) -> None:
    raw = np.random.default_rng(row_bytes).integers(0, 256, (num_rows, row_bytes)).astype(np.uint8)
    expected = [plain_check_word(0, row_id, bytes(row)) for row_id, row in zip((0, -1, 5), raw, strict=False)]
    assert check_words(np.zeros(num_rows, np.uint32), IDS[[0, 1, 2]][:num_rows], voids(raw)).tolist() == expected
    assert value_dtype(row_bytes).itemsize == row_bytes + CHECK_BYTES


@given(st.binary(min_size=64, max_size=64), st.integers(0, 15), st.binary(min_size=4, max_size=4))
def test_a_change_of_one_word_never_goes_unnoticed(record: bytes, position: int, word: bytes) -> None:
    other = record[: 4 * position] + word + record[4 * position + 4 :]
    first, second = (check_words(TABLES[:1], IDS[:1], np.frombuffer(data, "V64")).tolist() for data in (record, other))
    assert (first == second) == (record == other)


@given(st.integers(0, 15), st.integers(0, 15), st.integers(0, 31), st.integers(0, 31))
def test_two_bits_turned(first: int, second: int, first_bit: int, second_bit: int) -> None:
    """Including the top bits of two words, that is two flipped signs."""
    words = np.arange(16, dtype=np.uint32).reshape(1, 16)
    before = check_words(TABLES[:1], IDS[:1], words.view("V64").reshape(-1))
    words[0, first] ^= np.uint32(1 << first_bit)
    words[0, second] ^= np.uint32(1 << second_bit)
    after = check_words(TABLES[:1], IDS[:1], words.view("V64").reshape(-1))
    assert (before == after).all() == ((first, first_bit) == (second, second_bit))


def test_another_id_or_table_or_nothing_at_all() -> None:
    row = np.zeros(1, "V16")
    words = [
        int(check_words(np.array([table], np.uint32), np.array([row_id], np.int64), row)[0])
        for table in (0, 1, 2**32 - 1)
        for row_id in (0, 1, -1, 2**62, -(2**63))
    ]
    assert len(set(words)) == len(words)
    assert 0 not in words, "a value of zeros alone is no row"
