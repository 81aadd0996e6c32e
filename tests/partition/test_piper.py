from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.partition.bisect import Layout
from bagpipe.partition.cost import Cluster, CostModel, Placed
from bagpipe.partition.cuts import MOST_SETS, closed_sets
from bagpipe.partition.piper import PiperSearch, piper
from bagpipe.partition.planner import Problem
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import graph, models, towers

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5), (2,)])


def search_of(model: CostModel, replicas: tuple[int, ...], count: int) -> PiperSearch:
    sets = closed_sets(model.graph, MOST_SETS)
    assert sets is not None
    return PiperSearch(model, replicas, count, sets)


@given(models(7, has_memory=False), REPLICAS, st.sampled_from([1, 4]))
def test_without_memory_limits_it_is_the_best_of_all(model: CostModel, replicas: tuple[int, ...], count: int):
    found, expected = search_of(model, replicas, count).solve(), best_of_all(model, replicas, [count])
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert model.bottleneck(found) == pytest.approx(expected[0], rel=1e-9)


def chains(search: PiperSearch) -> Iterator[Layout]:
    """Every partition of a chain whose stages fit by the planner's rule."""
    order, count = search.model.graph.order, search.microbatches
    for cuts in itertools.product([False, True], repeat=len(order) - 1):
        masks = [1 << order[0]]
        for operator, cut in zip(order[1:], cuts, strict=True):
            masks = [*masks, 1 << operator] if cut else [*masks[:-1], masks[-1] | 1 << operator]
        for replicas in itertools.product(search.replicas, repeat=len(masks)):
            after = [sum(replicas[number:]) for number in range(len(masks))]
            layout = tuple(Placed(mask, d, count) for mask, d in zip(masks, replicas, strict=True))
            fits = (search.fits(s.mask, s.replicas, k) for s, k in zip(layout, after, strict=True))
            if after[0] <= search.model.cluster.devices and all(fits):
                yield layout


@given(models(6, chains=True), REPLICAS, st.sampled_from([1, 4]))
def test_with_memory_limits_it_is_the_best_chain(model: CostModel, replicas: tuple[int, ...], count: int):
    if not model.graph.is_chain:
        return
    search = search_of(model, replicas, count)
    found, expected = search.solve(), list(chains(search))
    assert (found is None) == (not expected)
    if found is not None:
        assert found in expected
        assert model.bottleneck(found) == pytest.approx(min(map(model.bottleneck, expected)), rel=1e-9)


def test_in_flight_is_the_devices_to_the_end_over_the_replicas():
    model = CostModel(graph(["ab"], activation_bytes=1), Cluster(devices=4, memory_bytes=6), 8)
    search = search_of(model, (1, 2), 4)
    assert search.fits(0b01, 1, 3), "3 micro-batches of 2 examples"
    assert not search.fits(0b01, 1, 4)
    assert search.fits(0b11, 2, 4), "2 micro-batches of 2 examples, on 2 devices"


def test_wide_graphs_are_left_to_others():
    model = CostModel(towers(5, 4), Cluster(devices=4), 64)
    assert piper(Problem(model=model, replicas=(1,), microbatches=(4,))) is None


def test_several_numbers_of_micro_batches():
    model = CostModel(towers(2, 2), Cluster(devices=4), 64)
    found = piper(Problem(model=model, replicas=(1, 2), microbatches=(2, 4)))
    assert found is not None
    assert found.exact
    assert {stage.microbatches for layout in found.layouts for stage in layout} == {2, 4}
    assert found.bottleneck_s == min(map(model.bottleneck, found.layouts))
