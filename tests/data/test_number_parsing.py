from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.number_parsing import byte_words, digit_words, parse_hex, parse_integers, quote

FIELDS = st.lists(st.text("0123456789abcdefABCDEF-+. x\0\t,", max_size=20).map(str.encode), min_size=1, max_size=30)


def positions(fields: list[bytes]) -> tuple[bytes, np.ndarray, np.ndarray]:
    widths = np.array([len(field) for field in fields], np.int64)
    return b"".join(fields), np.cumsum(widths), widths


@given(FIELDS)
def test_numbers_are_parsed_and_other_text_is_flagged(fields: list[bytes]) -> None:
    """Fields are adjacent without separators: the parser must read nothing outside a field."""
    text, ends, widths = positions(fields)
    values, wrong = parse_integers(digit_words(text), ends, widths)
    good = [re.fullmatch(rb"(-?[0-9]{1,16})?", field) is not None for field in fields]
    assert (~wrong).tolist() == good
    assert values[~wrong].tolist() == [int(field or b"0") for field, fits in zip(fields, good, strict=True) if fits]
    values, wrong = parse_hex(digit_words(text), ends, widths)
    good = [re.fullmatch(rb"([0-9a-fA-F]{1,16})?", field) is not None for field in fields]
    assert (~wrong).tolist() == good
    expected = [int(field or b"0", 16) for field, fits in zip(fields, good, strict=True) if fits]
    assert values[~wrong].view(np.uint64).tolist() == expected


@given(FIELDS)
def test_the_last_eight_bytes_of_fields(fields: list[bytes]) -> None:
    words = byte_words(*positions(fields))
    assert [int(word).to_bytes(8, "little") for word in words] == [field[-8:].rjust(8, b"\0") for field in fields]


def test_shapes_are_kept() -> None:
    text, ends, widths = positions([b"12", b"", b"-3", b"ffffffffffffffff"])
    values, wrong = parse_integers(digit_words(text), ends.reshape(2, 2), widths.reshape(2, 2))
    assert values[0].tolist() == [12, 0]
    assert wrong.tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize(("text", "shown"), [(b"a'b", '"a\'b"'), (b"\xff", "'\\\\xff'"), (b"x" * 41, f"'{'x' * 40}…'")])
def test_quote(text: bytes, shown: str) -> None:
    assert quote(text) == shown
