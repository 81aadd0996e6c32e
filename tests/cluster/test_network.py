from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.errors import ScheduleError

PAIRS = Network(
    bandwidth_bytes_per_s=10.0,
    latency_s=1.0,
    local_bandwidth_bytes_per_s=40.0,
    local_latency_s=0.5,
    hosts={0: 0, 1: 0, 2: 1, 3: 1},
)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    assert PAIRS.all_reduce_s(80.0, [2]) == 0
    assert PAIRS.all_reduce_s(80.0, [0, 1]) == pytest.approx(80 / 40 + 2 * 0.5)
    # Four ranks: 6 messages of a quarter, and each host's port carries one of the ring's messages at a time.
    assert PAIRS.all_reduce_s(80.0, [0, 1, 2, 3]) == pytest.approx(6 * 20 / 10 + 6 * 1.0)
    slow_inside = dataclasses.replace(PAIRS, local_bandwidth_bytes_per_s=5.0)
    assert slow_inside.all_reduce_s(80.0, [0, 1, 2, 3]) == pytest.approx(6 * 20 / 5 + 6 * 1.0)
    assert slow_inside.all_reduce_s(80.0, [0, 2]) == pytest.approx(80 / 10 + 2 * 1.0)


def test_an_all_gather_is_half_of_an_all_reduce() -> None:
    assert PAIRS.all_gather_s(80.0, [2]) == 0
    assert PAIRS.all_gather_s(80.0, [0, 1, 2, 3]) == pytest.approx(3 * 20 / 10 + 3 * 1.0)


def test_an_all_to_all_is_as_slow_as_its_busiest_port() -> None:
    assert PAIRS.all_to_all_s(80.0, [2]) == 0
    assert PAIRS.all_to_all_s(80.0, [0, 1]) == pytest.approx(20 / 40 + 0.5)
    # Four ranks send 5 bytes to each other one; a host's two ranks send 4 such messages to the other host.
    assert PAIRS.all_to_all_s(80.0, [0, 1, 2, 3]) == pytest.approx(4 * 5 / 10 + 3 * 1.0)
    # Of three ranks, the one that is alone on its host sends as much as the other two together.
    assert PAIRS.all_to_all_s(90.0, [0, 1, 2]) == pytest.approx(2 * 10 / 10 + 2 * 1.0)


def test_a_tensor_between_stages_takes_the_busiest_port() -> None:
    assert PAIRS.split_batch_s(80.0, [0], [1]) == pytest.approx(0.5 + 80 / 40)
    assert PAIRS.split_batch_s(80.0, [0], [2]) == pytest.approx(1.0 + 80 / 10)
    assert PAIRS.split_batch_s(80.0, [0, 1], [2, 3]) == pytest.approx(1.0 + 80 / 10)  # one port of each host
    # Six senders on two hosts, two receivers on the second: the first host's port has 4 of 6 parts.
    fours = Network(bandwidth_bytes_per_s=1.0, hosts={rank: rank // 4 for rank in range(8)})
    assert fours.split_batch_s(6.0, range(6), [6, 7]) == pytest.approx(4.0)
    alone = Network(bandwidth_bytes_per_s=10.0)
    assert alone.split_batch_s(80.0, [0, 1], [2, 3, 4]) == pytest.approx(40 / 10)


def test_ranks_share_the_port_of_their_host() -> None:
    assert PAIRS.rank_bandwidth_bytes_per_s(4) == 5.0
    assert PAIRS.rank_bandwidth_bytes_per_s(2) == 40.0
    assert PAIRS.rank_bandwidth_bytes_per_s(1) == 10.0


@given(st.integers(2, 9), st.integers(1, 1000))
def test_a_ring_sends_what_its_rounds_send(count: int, num_bytes: int) -> None:
    network = Network(bandwidth_bytes_per_s=7.0, latency_s=0.25, message_s=0.125)
    rounds = 2 * (count - 1)
    expected = rounds * (num_bytes / count / 7 + 0.125 + 0.25)
    assert network.all_reduce_s(num_bytes, range(count)) == pytest.approx(expected)


def test_refused() -> None:
    with pytest.raises(ScheduleError, match="bandwidth_bytes_per_s must be above 0, got 0"):
        Network(bandwidth_bytes_per_s=0)
    with pytest.raises(ScheduleError, match="latency_s must be at least 0 and finite, got inf"):
        Network(bandwidth_bytes_per_s=1, latency_s=float("inf"))
