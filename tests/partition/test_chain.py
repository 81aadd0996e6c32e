from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.partition.bisect import Layout, least_bottleneck
from bagpipe.partition.chain import ChainSearch, live_bytes
from bagpipe.partition.cost import Cluster, CostModel, Placed
from tests.partition.graphs import graph, models, valid
from tests.partition.least_total import least_total

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (2,)])


def all_chains(search: ChainSearch) -> list[Layout]:
    """All partitions of the order into runs, with every choice of replicas that devices and memory allow."""
    found = []
    model, size = search.model, len(search.order)
    for cuts in itertools.product([False, True], repeat=size - 1):
        masks = [1 << search.order[0]]
        for operator, cut in zip(search.order[1:], cuts, strict=True):
            if cut:
                masks.append(0)
            masks[-1] |= 1 << operator
        for replicas in itertools.product(search.replicas.tolist(), repeat=len(masks)):
            layout = tuple(Placed(m, d, search.microbatches) for m, d in zip(masks, replicas, strict=True))
            batch = model.batch_examples
            in_flight = [
                -(min(after + 1, search.microbatches) * batch // -search.microbatches)
                for after in reversed(range(len(masks)))
            ]
            totals = [model.totals(mask) for mask in masks]
            if sum(replicas) <= model.cluster.devices and all(map(model.fits, totals, replicas, in_flight)):
                found.append(layout)
    return found


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


@settings(max_examples=50)
@given(models(5), REPLICAS, st.sampled_from([1, 4]))
def test_the_least_total(model: CostModel, replicas: Sequence[int], count: int):
    """Alpa's objective compared with all chains."""
    search = ChainSearch(model, replicas, count)
    chains = all_chains(search)
    found = least_total(search)
    assert (found is None) == (not chains)

    def total(layout: Layout) -> float:
        ends = list(itertools.accumulate(stage.mask.bit_count() for stage in layout))
        times = [
            search.times[search.replicas.tolist().index(stage.replicas), end - stage.mask.bit_count(), end]
            for stage, end in zip(layout, ends, strict=True)
        ]
        return float(sum(times) + (count - 1) * max(times)) * model.batch_examples / count

    if found is not None:
        assert found[1] in chains
        assert found[0] == pytest.approx(total(found[1]), rel=1e-9)
        assert found[0] == pytest.approx(min(map(total, chains)), rel=1e-9)


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
    model = CostModel(skip, Cluster(devices=4, bandwidth_bytes_per_s=1.0), 4)
    assert live_bytes(model, skip.order) == [0, 1, 2, 2, 0]
    each = tuple(Placed(1 << n, 1, 4) for n in skip.order)
    assert ChainSearch(model, [1], 4).bottleneck(each) == 4  # in 2, out 2
    assert model.bottleneck(each) == 2


def test_an_order_may_be_given():
    two = graph(["ac", "bc"])
    model = CostModel(two, Cluster(devices=3), 4)
    assert ChainSearch(model, [1], 4, order=(1, 0, 2)).solve(1.5) == tuple(Placed(1 << n, 1, 4) for n in (1, 0, 2))
