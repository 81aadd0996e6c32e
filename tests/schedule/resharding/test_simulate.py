from __future__ import annotations

import pytest

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.plan import Broadcast, Resharding, send_to_all
from bagpipe.schedule.resharding.simulate import simulate
from bagpipe.schedule.resharding.tasks import unit_tasks
from tests.schedule.resharding.arrays import layout


def one_broadcast(receivers: int, chunks: int, *, relays: bool, rows: int = 12) -> Resharding:
    source, target = layout("replicated", 0, 1), layout("replicated", 1, receivers)
    (task,) = unit_tasks(source, target, rows, 1)
    broadcast = Broadcast(task=task, sender=0, route=task.receivers, chunks=chunks, relays=relays)
    return Resharding(source=source, target=target, rows=rows, columns=1, broadcasts=(broadcast,))


def seconds(plan: Resharding, network: Network) -> float:
    return simulate(plan, network, element_bytes=1).makespan_s


@pytest.mark.parametrize("receivers", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 12])
def test_a_relayed_broadcast_takes_one_slice_and_a_chunk_per_relay(receivers: int, chunks: int) -> None:
    network = Network(bandwidth_bytes_per_s=1.0)
    expected = 12 + (receivers - 1) * 12 / chunks
    assert seconds(one_broadcast(receivers, chunks, relays=True), network) == pytest.approx(expected)
    assert seconds(one_broadcast(receivers, chunks, relays=False), network) == pytest.approx(12 * receivers)


def test_messages_and_latency_cost_time() -> None:
    network = Network(bandwidth_bytes_per_s=2.0, latency_s=10.0, message_s=1.0)
    assert seconds(one_broadcast(1, 1, relays=True), network) == 1 + 6 + 10
    assert seconds(one_broadcast(1, 3, relays=True), network) == 3 + 6 + 10
    assert seconds(one_broadcast(2, 3, relays=True), network) == 4 + 8 + 20  # one chunk later, two latencies
    assert seconds(one_broadcast(2, 1, relays=False), network) == 2 * (1 + 6) + 10


def test_ports_are_used_by_one_message_at_a_time() -> None:
    plan = send_to_all(layout("features", 0, 2), layout("batch", 2, 2), 4, 2)
    done = simulate(plan, Network(bandwidth_bytes_per_s=1.0), element_bytes=1)
    # 0 -> 2, 1 -> 2 wait for each other at rank 2, and so do the two to rank 3 behind them.
    assert list(done.starts) == [0, 2, 2, 4]
    assert list(done.ends) == [2, 4, 4, 6]
    assert done.makespan_s == 6
    assert done.busy_s == {("rank", r, way): 4 for r, way in ((0, "out"), (1, "out"), (2, "in"), (3, "in"))}


def test_nothing_to_send_takes_no_time() -> None:
    plan = send_to_all(layout("batch", 0, 2), layout("batch", 0, 2), 4, 2)
    assert simulate(plan, Network(bandwidth_bytes_per_s=1.0)).makespan_s == 0
