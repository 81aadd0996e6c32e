from __future__ import annotations

import math

import pytest

from bagpipe.errors import InputError
from bagpipe.util.sizes import bytes_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16e9", 16e9), ("16GB", 16e9), ("16GiB", 16 << 30), ("1.5 kB", 1500), ("64", 64), ("inf", math.inf)],
)
def test_bytes_as_people_write_them(text: str, expected: float):
    assert bytes_of("--memory", text) == expected


@pytest.mark.parametrize("text", ["", "much", "1..2", "-1", "0", "1 GBit", "nan"])
def test_anything_else_is_refused(text: str):
    with pytest.raises(InputError, match=r"^--memory: expected "):
        bytes_of("--memory", text)
