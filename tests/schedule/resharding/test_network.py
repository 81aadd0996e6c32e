from __future__ import annotations

import pytest

from bagpipe.errors import ScheduleError
from bagpipe.schedule.resharding.network import Network


def test_ranks_of_a_host_share_its_ports() -> None:
    network = Network(bandwidth_bytes_per_s=1e9, message_s=1e-6, hosts={0: 5, 1: 5}, local_bandwidth_bytes_per_s=4e9)
    assert network.ports(0, 2) == (("host", 5, "out"), ("rank", 2, "in"))
    assert network.ports(1, 2) == (("host", 5, "out"), ("rank", 2, "in"))
    assert network.ports(0, 1) == (("local", 0, "out"), ("local", 1, "in"))
    assert network.busy_s(0, 2, 1000) == pytest.approx(2e-6)
    assert network.busy_s(0, 1, 1000) == pytest.approx(1.25e-6)


def test_refused() -> None:
    with pytest.raises(ScheduleError, match="bandwidth_bytes_per_s must be above 0, got 0"):
        Network(bandwidth_bytes_per_s=0)
    with pytest.raises(ScheduleError, match="latency_s must be at least 0 and finite, got inf"):
        Network(bandwidth_bytes_per_s=1, latency_s=float("inf"))
