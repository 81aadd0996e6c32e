from __future__ import annotations

import pytest

from bagpipe.calibration.rows import measure_rows

pytestmark = pytest.mark.redis


def test_rates_of_both_ends():
    (client,), (server,) = measure_rows((4,))
    assert client.row_bytes == server.row_bytes == 32
    assert min(client.reads_per_s, client.writes_per_s, server.reads_per_s, server.writes_per_s) > 0
