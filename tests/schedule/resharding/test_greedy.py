from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.schedule.resharding.greedy import greedy
from bagpipe.schedule.resharding.layouts import Layout
from bagpipe.schedule.resharding.plan import send_to_all
from bagpipe.schedule.resharding.simulate import simulate
from tests.schedule.resharding.arrays import layout, sides

networks = st.builds(
    Network,
    bandwidth_bytes_per_s=st.sampled_from((1e6, 1e9)),
    latency_s=st.sampled_from((0.0, 1e-6, 1e-3)),
    message_s=st.sampled_from((0.0, 1e-6, 1e-3)),
    hosts=st.dictionaries(st.integers(0, 7), st.integers(0, 2)),
    local_bandwidth_bytes_per_s=st.sampled_from((1e9, 1e10)),
)


@given(sides(), st.integers(0, 40), st.integers(1, 20), networks)
def test_it_is_never_slower_than_sending_to_all(
    pair: tuple[Layout, Layout], rows: int, columns: int, network: Network
) -> None:
    chosen = simulate(greedy(*pair, rows, columns, network), network).makespan_s
    assert chosen <= simulate(send_to_all(*pair, rows, columns), network).makespan_s


def test_equal_slices_take_turns() -> None:
    """From three columns to three rows: in each of three rounds all ports are busy."""
    network = Network(bandwidth_bytes_per_s=1.0)
    source, target = layout("features", 0, 3), layout("batch", 3, 3)
    chosen = simulate(greedy(source, target, 3, 3, network, element_bytes=1), network, element_bytes=1)
    assert sorted(chosen.starts) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    plain = simulate(send_to_all(source, target, 3, 3), network, element_bytes=1)
    assert plain.makespan_s == 5


def test_replicas_share_the_sending() -> None:
    network = Network(bandwidth_bytes_per_s=1.0)
    chosen = greedy(layout("replicated", 0, 3), layout("batch", 3, 6), 6, 1, network)
    assert sorted(broadcast.sender for broadcast in chosen.broadcasts) == [0, 0, 1, 1, 2, 2]


def test_a_host_gets_a_slice_once() -> None:
    """Two receivers share a host: the second one has the slice from the first."""
    network = Network(bandwidth_bytes_per_s=1e6, hosts={1: 7, 3: 7}, local_bandwidth_bytes_per_s=1e9)
    (broadcast,) = greedy(layout("replicated", 0, 1), layout("replicated", 1, 3), 1000, 1, network).broadcasts
    assert broadcast.route == (1, 3, 2)
    assert broadcast.relays


def test_long_latencies_and_short_messages_are_not_relayed() -> None:
    network = Network(bandwidth_bytes_per_s=1e9, latency_s=1.0)
    (broadcast,) = greedy(layout("replicated", 0, 1), layout("replicated", 1, 3), 4, 1, network).broadcasts
    assert not broadcast.relays


def test_equal_arguments_give_equal_orders() -> None:
    network = Network(bandwidth_bytes_per_s=1e9)
    source, target = layout("batch", 0, 4), layout("features", 4, 3)
    assert greedy(source, target, 30, 20, network) == greedy(source, target, 30, 20, network)
