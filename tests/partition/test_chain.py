from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cluster.network import Network
from bagpipe.partition.bisect import least_bottleneck
from bagpipe.partition.chain import ChainSearch, live_bytes
from bagpipe.partition.cost import Cluster, CostModel, Placed
from tests.partition.all_chains import all_chains
from tests.partition.graphs import graph, models, valid

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (2,)])


@given(models(6), REPLICAS, st.booleans(), st.sampled_from([1, 4]))
def test_the_best_of_all_chains(model: CostModel, replicas: Sequence[int], relay: bool, count: int):
    search = ChainSearch(model, replicas, count, relay=relay)
    chains = all_chains(search)
    found = least_bottleneck(search.bottleneck, search.solve)
    assert (found is None) == (not chains)
    if found is not None:
        assert found in chains
        assert search.bottleneck(found) == pytest.approx(min(map(search.bottleneck, chains)), rel=1e-9)
        assert valid(model, found)


@given(models(6), st.sampled_from([1, 4]))
def test_the_tables_equal_the_cost_model(model: CostModel, count: int):
    search = ChainSearch(model, (1, 2, 3), count, relay=False)
    for number, replicas in enumerate(search.replicas.tolist()):
        for start, end in itertools.combinations(range(len(search.order) + 1), 2):
            totals = model.totals(sum(1 << n for n in search.order[start:end]))
            time = model.time_per_example(totals, replicas, count)
            assert search.times[number, start, end] == pytest.approx(time, rel=1e-12)
    assert math.isinf(search.times[0, 0, 0])


def test_relayed_tensors():
    """a sends to d past b and c."""
    skip = graph(["ab", "bc", "cd", "ad"], output_bytes=1)
    model = CostModel(skip, Cluster(devices=4, network=Network(bandwidth_bytes_per_s=1.0)), 4)
    assert live_bytes(model, skip.order) == [0, 1, 2, 2, 0]
    each = tuple(Placed(1 << n, 1, 4) for n in skip.order)
    assert ChainSearch(model, [1], 4).bottleneck(each) == 4  # in 2, out 2
    assert model.bottleneck(each) == 2


def test_an_order_may_be_given():
    two = graph(["ac", "bc"])
    model = CostModel(two, Cluster(devices=3), 4)
    assert ChainSearch(model, [1], 4, order=(1, 0, 2)).solve(1.5) == tuple(Placed(1 << n, 1, 4) for n in (1, 0, 2))
