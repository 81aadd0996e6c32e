from __future__ import annotations

from bagpipe.calibration.link import measure_link


def test_the_loopback():
    link = measure_link()
    assert link.bytes_per_s > 0
    assert link.latency_s > 0
