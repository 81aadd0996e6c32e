from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagpipe.cluster.model import Link, RowRates
from bagpipe.errors import InputError
from tests.cluster.clusters import CARD, CPU, cluster, hosts


def test_ranks_are_numbered_host_by_host() -> None:
    model = cluster(hosts(2), hosts(1, "cpu", devices_per_host=1))
    assert model.num_ranks == 5
    assert [host for host, _ in model.hosts_of_ranks()] == [0, 0, 1, 1, 2]
    assert model.devices_of_ranks() == (CARD,) * 4 + (CPU,)
    assert model.devices_of_ranks(3) == (CARD,) * 3


def test_prices_add_up() -> None:
    assert cluster().usd_per_hour() == 2 * 3.0 + 2 * 1.0 + 0.5
    assert cluster(stores=None, cachers=None).usd_per_hour() == 6.0
    assert [cluster().usd_per_hour(ranks) for ranks in (1, 2, 3)] == [5.5, 5.5, 8.5], "hosts in use"


def test_speeds_are_those_of_float32() -> None:
    mixed = cluster(hosts(1), hosts(1, "cpu"))
    assert mixed.speeds_of_ranks() == (1.0, 1.0, 0.01, 0.01)
    without = replace(mixed, devices={"card": CARD, "cpu": replace(CPU, flops={"float64": 1e9})})
    assert without.speeds_of_ranks(2) == (1.0, 1.0)
    with pytest.raises(InputError, match=r"devices\.cpu\.flops: expected a rate of float32, got float64"):
        without.speeds_of_ranks()


def test_the_network_of_its_ranks() -> None:
    network = cluster().network()
    assert network.hosts == {0: 0, 1: 0, 2: 1, 3: 1}
    assert (network.bandwidth_bytes_per_s, network.local_bandwidth_bytes_per_s) == (1e9, 8e9)
    assert (network.latency_s, network.local_latency_s) == (2e-5, 1e-6)
    assert cluster(hosts(ports=4)).network().bandwidth_bytes_per_s == 4e9
    assert cluster(hosts(devices_per_host=1)).network().hosts == {}


def test_unlike_hosts_are_as_fast_as_the_slowest() -> None:
    slow = replace(hosts(1, "cpu"), port="local", local_link="net")
    network = cluster(hosts(1), slow).network()
    assert (network.bandwidth_bytes_per_s, network.local_bandwidth_bytes_per_s) == (1e9, 1e9)
    assert cluster(hosts(1), slow).network(2).local_bandwidth_bytes_per_s == 8e9, "the first host's ranks only"


def test_a_call_takes_the_longer_of_arithmetic_and_memory() -> None:
    assert CPU.roofline_s(1e11, 1e9) == pytest.approx(1e-5 + 1.0)
    assert CPU.roofline_s(1e9, 1e10) == pytest.approx(1e-5 + 1.0)
    assert CPU.roofline_s(1e11, 0, "float64") == pytest.approx(1e-5 + 2.0)
    with pytest.raises(InputError, match="flops of bfloat16: expected one of float32, float64"):
        CPU.roofline_s(1, 1, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainers": ()}, "trainers: expected at least one kind of hosts, got none"),
        ({"trainers": (hosts(device="tpu"),)}, r"trainers\[0\]\.device: expected one of cpu, card, got 'tpu'"),
        ({"trainers": (hosts(port="wifi"),)}, r"trainers\[0\]\.port: expected one of local, net, got 'wifi'"),
        ({"trainers": (hosts(0),)}, r"trainers\[0\]\.hosts: expected a number above 0, got 0"),
        ({"links": {"local": Link(bytes_per_s=0), "net": Link(bytes_per_s=1)}}, "links.local.bytes_per_s: expected a"),
        ({"links": {"local": Link(bytes_per_s=1, latency_s=-1)}}, "latency_s: expected a number of at least 0, got -1"),
        ({"devices": {"card": replace(CARD, flops={})}}, "devices.card.flops: expected at least one, got none"),
        ({"devices": {"card": replace(CARD, flops={"float32": float("nan")})}}, "flops.float32: expected a number"),
        ({"stores": replace(cluster().stores, rows=())}, "stores.rows: expected the rates of at least one row size"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(cluster(), **change)


def test_row_sizes_ascend() -> None:
    rates = RowRates(row_bytes=136, reads_per_s=1.0, writes_per_s=1.0)
    with pytest.raises(InputError, match=r"stores\.rows: expected ascending row_bytes, got \[136, 136\]"):
        cluster(stores=replace(cluster().stores, rows=(rates, rates)))


def test_too_many_ranks() -> None:
    with pytest.raises(InputError, match="expected a cluster with 5 devices, got 4 of 'small'"):
        cluster().network(5)
