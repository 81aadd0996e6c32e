from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from data.arrow_numbers import as_ids, as_numbers, split_texts


def test_texts_are_split() -> None:
    lists = split_texts(pa.array(["3|17", None, "", "x", "|a||"]), "|")
    assert lists.to_pylist() == [[b"3", b"17"], [], [], [b"x"], [None, b"a", None, None]]
    assert split_texts(pa.array(["a, b"]), ", ").to_pylist() == [[b"a", b"b"]]
    assert split_texts(pa.array([], pa.string()), "|").to_pylist() == []


def test_integers() -> None:
    good = {"0": 0, "-12": -12, str(2**63 - 1): 2**63 - 1, str(-(2**63)): -(2**63), "9" * 19: int("9" * 19) - 2**64}
    bad = ["x", "1.0", "", "+1", " 1", str(-(2**63) - 1), str(2**64), "9" * 20, "-" + "1" * 20, "1" * 21]
    ids, wrong = as_ids(pa.array([*bad, *good]))
    assert wrong.tolist() == list(range(len(bad)))
    assert ids.tolist() == [*[0] * len(bad), *good.values()]


@given(st.lists(st.integers(-(2**63), 2**64 - 1)))
def test_every_64_bit_integer_is_read(numbers: list[int]) -> None:
    ids, wrong = as_ids(pa.array([str(number) for number in numbers], pa.string()))
    assert wrong.size == 0
    assert ids.tolist() == [number - 2**64 * (number >= 2**63) for number in numbers]


def test_numbers() -> None:
    numbers, wrong = as_numbers(pa.array([b"1", b"-.5", b"2.", b"1e2", b"x", None, b"nan", b""]))
    assert numbers.to_numpy().tolist() == [1, -0.5, 2, 100, 0, 0, 0, 0]
    assert numbers.type == pa.float32()
    assert np.array_equal(wrong, [4, 5, 6, 7])
