from __future__ import annotations

import pytest

from bagpipe.calibration.rows import line, measure_rows


@pytest.mark.parametrize(
    ("counts", "times_s", "expected"),
    [
        ((10, 110), (2.0, 4.0), (1.8, 0.02)),
        ((10, 110), (2.0, 2.0), (2.0, 0.0)),
        ((10, 110), (0.0, 11.0), (0.0, 0.1)),  # no negative fixed time
        ((10, 110), (4.0, 2.0), (4.0, 0.0)),  # no negative time of an item
        ((0, 0), (1.0, 3.0), (1.0, 0.0)),
    ],
)
def test_a_line_through_two_measurements(
    counts: tuple[float, float], times_s: tuple[float, float], expected: tuple[float, float]
):
    assert line(counts, times_s) == pytest.approx(expected)


@pytest.mark.redis
def test_rates_of_a_server():
    (server,) = measure_rows((4,))
    assert server.row_bytes == 32
    assert min(server.reads_per_s, server.writes_per_s) > 0
    assert min(server.read_fixed_s, server.write_fixed_s) >= 0
