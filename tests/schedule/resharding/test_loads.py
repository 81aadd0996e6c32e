from __future__ import annotations

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.loads import Loads
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import layout

NETWORK = Network(bandwidth_bytes_per_s=1.0, latency_s=0.5)


def bound(before: str, n: int, after: str, m: int, rows: int, network: Network = NETWORK) -> float:
    tasks = unit_tasks(layout(before, 0, n), layout(after, n, m), rows, 1)
    return Loads.of(tasks, network, 1).bound_s({})


def test_the_busiest_port_is_a_bound() -> None:
    assert bound("batch", 2, "batch", 1, 6) == 6.5  # into the one receiver
    assert bound("batch", 1, "batch", 3, 6) == 6.5  # out of the one sender
    assert bound("batch", 3, "replicated", 4, 6) == 6.5  # each receiver needs all
    assert bound("replicated", 3, "batch", 6, 6) == 2.5  # six slices out of three
    assert bound("replicated", 5, "batch", 6, 6) == 2.5  # one of five sends two
    assert bound("batch", 2, "batch", 2, 0) == 0.0


def test_a_slice_enters_a_host_once() -> None:
    hosts = Network(bandwidth_bytes_per_s=1.0, hosts={2: 9, 3: 9}, local_bandwidth_bytes_per_s=100.0)
    assert bound("batch", 2, "batch", 2, 6, hosts) == 6.0
    assert bound("batch", 2, "replicated", 2, 6, hosts) == 6.0
    one_host = Network(bandwidth_bytes_per_s=1.0, hosts=dict.fromkeys(range(4), 0))
    assert bound("batch", 2, "batch", 2, 6, one_host) == 0.0


def test_ports_that_are_busy_come_on_top() -> None:
    tasks = unit_tasks(layout("batch", 0, 2), layout("batch", 2, 2), 4, 1)
    loads = Loads.of(tasks, NETWORK, 1)
    assert loads.bound_s({("rank", 3, "in"): 5.0}) == 7.5
    assert loads.bound_s({}, since_s=3.0) == 5.5
    loads.change(tasks[1], -1)
    assert loads.bound_s({("rank", 3, "in"): 5.0}) == 2.5
