"""Bytes of rows in a server: the numbers that Redis 7.0 with jemalloc was measured to take."""

from __future__ import annotations

import pytest

from bagpipe.store.row_checksum import CHECK_BYTES
from bagpipe.store.sizing import server_bytes


@pytest.mark.parametrize(
    ("value_bytes", "measured"),
    [(24, 90.6), (72, 138.5), (136, 218.5), (200, 282.5), (204, 282.5), (264, 378.5), (520, 698.7), (1032, 1338.9)],
)
def test_the_estimate_is_the_measured_size(value_bytes: int, measured: float) -> None:
    assert server_bytes(value_bytes - CHECK_BYTES) == pytest.approx(measured, abs=2)
