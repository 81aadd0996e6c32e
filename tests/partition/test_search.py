from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.bisect import least_bottleneck
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.search import find
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import models, towers, valid

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5)])


@settings(max_examples=50)
@given(models(7), REPLICAS, st.sampled_from([(4,), (2, 8)]))
def test_small_graphs_get_the_optimum(model: CostModel, replicas: Sequence[int], counts: Sequence[int]):
    found, expected = find(model, replicas, counts), best_of_all(model, replicas, counts)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.exact
        assert valid(model, found.best)
        assert found.best in found.layouts
        assert found.bottleneck_s == pytest.approx(expected[0], rel=1e-9)


@given(models(8), REPLICAS, st.sampled_from([0, 256]))
def test_never_worse_than_the_best_chain(model: CostModel, replicas: Sequence[int], exact_limit: int):
    """Relayed or not, with either search."""
    found = find(model, replicas, (4,), exact_limit=exact_limit)
    for relay in (False, True):
        search = ChainSearch(model, replicas, 4, relay=relay)
        chain = least_bottleneck(search.bottleneck, search.solve)
        if chain is not None:
            assert found is not None
            assert found.bottleneck_s <= search.bottleneck(chain) * (1 + 1e-9)
    if found is not None:
        assert all(valid(model, layout) for layout in found.layouts)


@given(models(7, chains=True), REPLICAS, st.sampled_from([0, 256]))
def test_a_chain_gets_what_the_chain_search_finds(model: CostModel, replicas: Sequence[int], exact_limit: int):
    found = find(model, replicas, (4,), exact_limit=exact_limit)
    search = ChainSearch(model, replicas, 4)
    chain = least_bottleneck(search.bottleneck, search.solve)
    assert (found is None) == (chain is None)
    if found is not None and chain is not None and model.graph.is_chain:
        assert found.bottleneck_s == pytest.approx(search.bottleneck(chain), rel=1e-9)


@pytest.mark.parametrize("branches", [2, 4, 7])
@pytest.mark.parametrize("replicas", [(1,), tuple(range(1, 9))], ids=["one", "any"])
def test_branches_beat_the_best_chain_where_links_bind(branches: int, replicas: Sequence[int]):
    """A chain forwards everything that later stages need."""
    cluster = Cluster(devices=8, network=Network(bandwidth_bytes_per_s=1e9))
    model = CostModel(towers(branches, 4), cluster, 4096)
    found = find(model, replicas, (32,))
    search = ChainSearch(model, replicas, 32)
    chain = least_bottleneck(search.bottleneck, search.solve)
    assert found is not None
    assert chain is not None
    assert found.bottleneck_s < 0.99 * search.bottleneck(chain)


def test_branches_beat_the_best_chain_where_memory_binds():
    """In a chain of eight stages, the first holds 8 micro-batches, so they must be small; the graph's stages hold 2."""
    model = CostModel(towers(7, 4), Cluster(devices=8, memory_bytes=1.2e9), 4096)
    counts = (4, 8, 16, 32, 64)
    found = find(model, (1,), counts)
    assert found is not None
    searches = [ChainSearch(model, (1,), count) for count in counts]
    chains = [(search, least_bottleneck(search.bottleneck, search.solve)) for search in searches]
    best = min(search.bottleneck(chain) for search, chain in chains if chain is not None)
    assert found.bottleneck_s < 0.995 * best


def test_sixteen_branches_over_32_devices():
    """128 layers, a concat and a final layer, as in the benchmark."""
    cluster = Cluster(devices=32, memory_bytes=16e9, network=Network(bandwidth_bytes_per_s=12.5e9, latency_s=1e-5))
    model = CostModel(towers(16, 8), cluster, 16384)
    found = find(model, range(1, 33), (64,))
    assert found is not None
    assert not found.exact
    assert valid(model, found.best)
    search = ChainSearch(model, range(1, 33), 64)
    chain = least_bottleneck(search.bottleneck, search.solve)
    assert chain is not None
    assert found.bottleneck_s <= search.bottleneck(chain)


def test_no_valid_layout():
    model = CostModel(towers(2, 2), Cluster(devices=2), 64)
    assert find(model, (4,), (8,)) is None
    tight = CostModel(towers(2, 2), Cluster(devices=2, memory_bytes=1e6), 64)
    assert find(tight, (1,), (8,)) is None
    assert find(tight, (1,), (8,), exact_limit=0) is None
