from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.errors import InputError
from bagpipe.partition.cost import Cluster, CostModel, Placed, cluster_of_job, in_flight_units
from bagpipe.partition.operators import Cost, Operator, OperatorGraph
from bagpipe.schedule.builders.graphpipe import in_flight_limits
from bagpipe.schedule.ir.stage_graph import StageGraph, chain
from tests.cluster.clusters import cluster, hosts
from tests.partition.graphs import graph

FAST = Cluster(devices=8)


def test_time_is_that_of_the_slowest_resource_and_the_gradients():
    op = Operator(
        name="a",
        forward=Cost(fixed_s=1.0, per_example_s=2.0),
        backward=Cost(fixed_s=3.0, per_example_s=4.0),
        param_bytes=100,
        output_bytes=10,
    )
    pair = OperatorGraph(operators=(op, Operator(name="b", forward=Cost(), backward=Cost())), edges=(("a", "b"),))
    cluster = Cluster(devices=4, network=Network(bandwidth_bytes_per_s=5.0, latency_s=0.5))
    model = CostModel(pair, cluster, batch_examples=10)
    first = model.totals(0b01)
    # 2 micro-batches: 2 * (1 + 3) fixed over 10 examples, 2 + 4 per example; the link 10 / 5 is hidden
    assert model.time_per_example(first, 1, 2) == pytest.approx(0.8 + 6.0)
    # 2 replicas halve the examples; ring: 2 * 1/2 * 100 / 5 + 2 * 0.5 seconds per batch
    assert model.time_per_example(first, 2, 2) == pytest.approx(0.8 + 3.0 + 21.0 / 10)
    assert model.time_per_example(model.totals(0b10), 1, 2) == pytest.approx(2.0)  # only the link


def test_a_tensor_counts_once_per_stage():
    fork = graph(["ab", "ac", "bd", "cd"], output_bytes=1)
    model = CostModel(fork, FAST, 1)
    by_name = {op.name: 1 << n for n, op in enumerate(fork.operators)}
    assert model.totals(by_name["a"]).transfer_bytes == 1
    assert model.totals(by_name["b"] | by_name["c"]).transfer_bytes == 3  # a's once, b's and c's
    assert model.totals(fork.everything).transfer_bytes == 0


def test_memory_counts_weights_once_and_examples_in_flight():
    cluster = Cluster(devices=2, memory_bytes=100, weight_copies=4)
    model = CostModel(graph(["ab"], param_bytes=5, activation_bytes=2), cluster, 8)
    whole = model.totals(0b11)
    assert model.memory_bytes(whole, 1, 8) == 40 + 32
    assert model.memory_bytes(whole, 2, 8) == 40 + 16
    assert model.fits(whole, 1, 15)
    assert not model.fits(whole, 1, 16)


@pytest.mark.parametrize(
    ("sizes", "examples"),
    [([4, 4, 4], [12, 8, 4]), ([1, 2, 4], [10, 8, 4]), ([64] * 6, [384, 320, 256, 192, 128, 64])],
)
def test_in_flight_on_a_chain(sizes: list[int], examples: list[int]):
    """GraphPipe's figure 5, and its published sequential strategy."""
    line = graph([a + b for a, b in zip("abcdef", "bcdef", strict=False)][: len(sizes) - 1])
    batch = 64 * 16
    model = CostModel(line, FAST, batch)
    assert model.in_flight([Placed(1 << n, 1, batch // size) for n, size in enumerate(sizes)]) == examples


def test_in_flight_with_four_stages_side_by_side():
    """GraphPipe's published strategy for branches: 3, 3, 3, 3 -> 2 -> 1 micro-batches of 64."""
    fan = graph(["ae", "be", "ce", "de", "ef"])
    model = CostModel(fan, FAST, 64 * 16)
    assert model.in_flight([Placed(1 << n, 1, 16) for n in range(6)]) == [192] * 4 + [128, 64]


def test_in_flight_is_at_most_the_batch():
    model = CostModel(graph(["ab", "bc"]), FAST, 8)
    assert model.in_flight([Placed(1 << n, 1, 2) for n in range(3)]) == [8, 8, 4]


@given(st.lists(st.sampled_from([2, 4, 8, 16]), min_size=1, max_size=4))
def test_in_flight_is_enough_for_the_schedule(counts: list[int]):
    """On chains of any sizes, the schedule `graph` needs no more memory than the searches assume."""
    stages = StageGraph(micro_per_batch=tuple(counts), edges=chain(len(counts), 1).edges)
    whole, units = math.lcm(*counts), [0] * len(counts)
    for number in reversed(range(len(counts))):
        below = [(units[number + 1], counts[number + 1])] if number + 1 < len(counts) else []
        units[number] = in_flight_units(counts[number], below, whole)
    for count, needed, limit in zip(counts, units, in_flight_limits(stages), strict=True):
        assert limit * (whole // count) <= needed


def test_least_replicas():
    model = CostModel(graph(["ab"], activation_bytes=1), Cluster(devices=8, memory_bytes=6), 8)
    assert model.least_replicas(0b11, 1, 0, target=2.0, choices=[1, 2, 4]) == 1
    assert model.least_replicas(0b11, 1, 0, target=1.9, choices=[1, 2, 4]) == 2
    assert model.least_replicas(0b11, 1, 8, target=2.0, choices=[1, 2, 4]) == 4  # 16 bytes over at most 6
    assert model.least_replicas(0b11, 1, 0, target=0.1, choices=[1, 2, 4]) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": 0}, "devices must be at least 1, got 0"),
        ({"devices": 1, "memory_bytes": 0}, "memory_bytes must be above 0, got 0"),
        ({"devices": 1, "weight_copies": -1.0}, "weight_copies must be a number of at least 0, got -1.0"),
        ({"devices": 2, "speeds": (1.0,)}, "speeds must be one per device, 2, got 1"),
        ({"devices": 1, "speeds": (0.0,)}, "speeds must be above 0, got"),
    ],
)
def test_bad_clusters(values: dict[str, float], message: str):
    with pytest.raises(InputError, match=message):
        Cluster(**values)  # type: ignore[arg-type]


def test_the_devices_of_a_cluster():
    mixed = cluster(hosts(1), hosts(1, "cpu"))
    found = cluster_of_job(mixed)
    assert (found.devices, found.memory_bytes, found.speeds) == (4, 8e9, (1.0, 1.0, 0.01, 0.01))
    assert found.network == mixed.network()
    assert found.host_sizes == (2, 2)
    assert not found.is_uniform
    assert cluster_of_job(mixed, 2).speeds == ()
    assert cluster_of_job(mixed, 2).is_uniform
    with pytest.raises(InputError, match="devices must be at least 1, got 0"):
        cluster_of_job(mixed, 0)


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="at least 1 example, got 0"):
        CostModel(graph(["ab"]), FAST, 0)


@pytest.mark.parametrize(("senders", "receivers"), [(1, 3), (2, 3), (3, 2), (4, 1), (3, 5), (6, 4)])
def test_the_link_between_stages_takes_as_long_as_its_busiest_port(senders, receivers):
    """Of two stages with their own numbers of replicas: a port carries the examples of its rank."""
    examples, output_bytes = 60, 8
    pair = graph(["ab"], output_bytes=output_bytes)
    model = CostModel(pair, Cluster(devices=16, network=Network(bandwidth_bytes_per_s=5.0)), examples)
    costed = max(model.time_per_example(model.totals(1 << n), d, 1) for n, d in enumerate((senders, receivers)))
    sent = Counter(("out", example * senders // examples) for example in range(examples))
    received = Counter(("in", example * receivers // examples) for example in range(examples))
    assert costed * examples == pytest.approx(max((sent | received).values()) * output_bytes / 5)
