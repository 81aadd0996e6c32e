from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.partition.bisect import least_bottleneck
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.cuts import CutSearch, closed_sets
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import graph, models, towers, valid

REPLICAS = st.sampled_from([(1,), (2,), (1, 2, 3, 4, 5)])
COUNTS = st.sampled_from([(1,), (4,), (2, 4), (2, 5)])


def agrees_with_all_partitions(model: CostModel, replicas: Sequence[int], counts: Sequence[int]) -> None:
    sets = closed_sets(model.graph, 256)
    assert sets is not None
    found = least_bottleneck(model.bottleneck, CutSearch(model, replicas, counts, sets).solve)
    expected = best_of_all(model, replicas, counts)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert valid(model, found)
        assert model.bottleneck(found) == pytest.approx(expected[0], rel=1e-9)


@given(models(6), REPLICAS, COUNTS)
def test_the_optimum_of_all_partitions(model: CostModel, replicas: Sequence[int], counts: Sequence[int]):
    """Any graph, series-parallel or not, with and without a memory limit, with equal and different micro-batches."""
    agrees_with_all_partitions(model, replicas, counts)


@settings(max_examples=40)
@given(models(8), REPLICAS)
def test_the_optimum_of_up_to_eight_operators(model: CostModel, replicas: Sequence[int]):
    agrees_with_all_partitions(model, replicas, (4,))


def test_closed_sets_of_branches_are_the_product_of_their_lengths():
    sets = closed_sets(towers(3, 2), 1000)
    assert sets is not None
    assert len(sets) == 1 + 1 + 3**3  # the empty set, post, then any number of layers of each branch before the concat
    assert sets[0] == 0
    assert sets[-1] == towers(3, 2).everything


def test_too_many_closed_sets():
    assert closed_sets(towers(16, 8), 300) is None


def test_of_equal_bottlenecks_the_shallower():
    """Both orders of the tiny operators have the bottleneck of a; side by side they are shallower."""
    fan = graph(["ad", "bd", "cd"], {"a": 3, "b": 1, "c": 1, "d": 1})
    for memory in (math.inf, 1e9):
        model = CostModel(fan, Cluster(devices=4, memory_bytes=memory), 16)
        sets = closed_sets(fan, 300)
        assert sets is not None
        layout = CutSearch(model, [1], [4], sets).solve(3.0)
        assert layout is not None
        assert max(model.in_flight(layout)) <= 8
