from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.bisect import Layout, least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.pipedream import HierarchicalSearch, RangeSearch, pipedream
from bagpipe.partition.piper import piper
from bagpipe.partition.planner import Problem
from tests.partition.all_chains import all_chains
from tests.partition.graphs import graph, models, operator_graphs, towers, valid

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4), (2,)])


@st.composite
def hosts_of_two(draw: st.DrawFn) -> CostModel:
    network = Network(
        bandwidth_bytes_per_s=draw(st.sampled_from([1.0, 0.25])),
        local_bandwidth_bytes_per_s=draw(st.sampled_from([4.0, 1.0])),
        local_latency_s=0.0,
        latency_s=draw(st.sampled_from([0.0, 2.0])),
        hosts={rank: rank // 2 for rank in range(4)},
    )
    return CostModel(draw(operator_graphs(5)), Cluster(devices=4, network=network), 16)


def is_hierarchical(layout: Sequence[int], hosts: int, per_host: int) -> bool:
    """Whether stages with these replicas are chains inside hosts, each on some of the hosts."""
    if not layout:
        return True
    for count, several in itertools.product(range(1, len(layout) + 1), range(1, hosts + 1)):
        own = layout[:count]
        is_inside = all(replicas % several == 0 for replicas in own) and sum(own) // several <= per_host
        if is_inside and is_hierarchical(layout[count:], hosts - several, per_host):
            return True
    return False


@given(hosts_of_two(), REPLICAS, st.sampled_from([1, 4]))
def test_two_levels_are_the_best_of_their_kind(model: CostModel, replicas: tuple[int, ...], count: int):
    chain = ChainSearch(model, replicas, count)
    allowed = [each for each in all_chains(chain) if is_hierarchical([stage.replicas for stage in each], 2, 2)]
    found = list(HierarchicalSearch(chain).layouts())
    assert bool(found) == bool(allowed)
    if found:
        assert found[0] in allowed
        assert chain.bottleneck(found[0]) == pytest.approx(min(map(chain.bottleneck, allowed)), rel=1e-9)


def test_two_levels_respect_the_memory():
    hosts = {rank: rank // 2 for rank in range(4)}
    line = graph(["ab", "bc", "cd"], activation_bytes=1)
    for memory_bytes, fits in ((4 * 4, True), (3, False)):
        cluster = Cluster(devices=4, memory_bytes=memory_bytes, network=Network(hosts=hosts))
        model = CostModel(line, cluster, 16)
        found = list(HierarchicalSearch(ChainSearch(model, (1, 2, 4), 4)).layouts())
        assert bool(found) == fits
        assert all(valid(model, layout) for layout in found)


@st.composite
def uneven(draw: st.DrawFn) -> CostModel:
    speeds = tuple(draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4)))
    sizes = draw(st.sampled_from([{}, {0: 0, 1: 0}, {1: 0, 2: 0, 3: 0}]))
    cluster = Cluster(
        devices=len(speeds),
        memory_bytes=draw(st.sampled_from([float("inf"), 120, 480])),
        speeds=speeds,
        network=Network(bandwidth_bytes_per_s=1.0, hosts=sizes, local_bandwidth_bytes_per_s=8.0),
    )
    return CostModel(draw(operator_graphs(5)), cluster, 16)


def all_of_them(model: CostModel, replicas: Sequence[int], count: int) -> list[Layout]:
    """Chains on ranks 0, 1, …, without regard to memory."""
    unlimited = Cluster(devices=model.cluster.devices)
    return all_chains(ChainSearch(CostModel(model.graph, unlimited, model.batch_examples), replicas, count))


@given(uneven(), REPLICAS, st.sampled_from([1, 4]))
def test_ranges_of_ranks_are_the_best(model: CostModel, replicas: tuple[int, ...], count: int):
    search = RangeSearch(model, replicas, count)
    times = {layout: search.bottleneck(layout) for layout in all_of_them(model, replicas, count)}
    possible = {layout: time for layout, time in times.items() if time < float("inf")}
    found = least_bottleneck(search.bottleneck, search.solve)
    assert (found is None) == (not possible)
    if found is not None:
        assert possible[found] == pytest.approx(min(possible.values()), rel=1e-9)


def test_a_fast_device_gets_more_operators():
    line = graph(["ab", "bc", "cd"])
    model = CostModel(line, Cluster(devices=2, speeds=(3.0, 1.0)), 16)
    found = pipedream(Problem(model=model, replicas=(1,), microbatches=(4,)))
    assert found is not None
    assert [stage.mask.bit_count() for stage in found.best] == [3, 1]


@given(models(6, has_memory=False), REPLICAS, st.sampled_from([(4,), (2, 8)]))
def test_its_bottleneck_is_at_least_piper_s(model: CostModel, replicas: tuple[int, ...], counts: tuple[int, ...]):
    """Relays only add to it; on a chain there are none, and both are the least."""
    problem = Problem(model=model, replicas=replicas, microbatches=counts)
    chain, best = pipedream(problem), piper(problem)
    assert (chain is None) == (best is None)
    if chain is not None and best is not None:
        assert chain.bottleneck_s >= best.bottleneck_s * (1 - 1e-9)
        if model.graph.is_chain:
            assert chain.bottleneck_s == pytest.approx(best.bottleneck_s, rel=1e-9)


def test_the_better_of_one_level_and_two():
    network = Network(
        bandwidth_bytes_per_s=1e9, local_bandwidth_bytes_per_s=1e11, hosts={rank: rank // 4 for rank in range(8)}
    )
    model = CostModel(towers(4, 2), Cluster(devices=8, network=network), 4096)
    replicas = tuple(range(1, 9))
    found = pipedream(Problem(model=model, replicas=replicas, microbatches=(8,)))
    chain = ChainSearch(model, replicas, 8)
    one_level = least_bottleneck(chain.bottleneck, chain.solve)
    assert found is not None
    assert one_level is not None
    two_levels = [chain.bottleneck(layout) for layout in HierarchicalSearch(chain).layouts()]
    assert found.bottleneck_s == min(chain.bottleneck(one_level), *two_levels)


def test_nothing_fits():
    model = CostModel(graph(["ab"], param_bytes=9), Cluster(devices=2, memory_bytes=8), 8)
    assert pipedream(Problem(model=model, replicas=(1,), microbatches=(4,))) is None
