from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.partition.bisect import Layout, least_bottleneck, probes
from bagpipe.partition.chain import ChainSearch
from bagpipe.partition.cost import Cluster, CostModel
from bagpipe.partition.decompose import decompose
from bagpipe.partition.series_parallel import TreeSearch
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import graph, models, towers, valid

REPLICAS = st.sampled_from([(1,), (1, 2, 3, 4, 5)])


def tree_search(model: CostModel, replicas: Sequence[int], count: int) -> TreeSearch:
    return TreeSearch(model, replicas, count, decompose(model.graph))


@given(models(7), REPLICAS, st.sampled_from([1, 4]))
def test_layouts_are_valid_and_no_better_than_the_best(model: CostModel, replicas: Sequence[int], count: int):
    expected = best_of_all(model, replicas, (count,))
    for layout in probes(model.bottleneck, tree_search(model, replicas, count).solve):
        assert valid(model, layout)
        assert expected is not None
        assert model.bottleneck(layout) >= expected[0] * (1 - 1e-9)


@given(models(7, chains=True), REPLICAS, st.sampled_from([1, 4]))
def test_on_a_chain_it_is_the_chain_search(model: CostModel, replicas: Sequence[int], count: int):
    chain = ChainSearch(model, replicas, count, relay=False)
    expected = least_bottleneck(chain.bottleneck, chain.solve)
    found = least_bottleneck(model.bottleneck, tree_search(model, replicas, count).solve)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert model.bottleneck(found) == pytest.approx(chain.bottleneck(expected), rel=1e-9)


def solved(edges: list[str], seconds: dict[str, float], devices: int, target: float) -> set[str] | None:
    operators = graph(edges, seconds)
    model = CostModel(operators, Cluster(devices=devices), 16)
    layout: Layout | None = tree_search(model, [1], 4).solve(target)
    return None if layout is None else {"".join(operators.names(stage.mask)) for stage in layout}


def test_branches_lie_side_by_side():
    assert solved(["ac", "bc"], {"c": 1}, devices=3, target=1) == {"a", "b", "c"}


def test_a_join_may_share_the_stage_of_a_branchs_end():
    found = solved(["ab", "bx", "cd", "dx"], {"x": 0.5}, devices=3, target=2)
    assert found in ({"a", "bx", "cd"}, {"c", "dx", "ab"})


def test_a_fork_may_share_the_stage_of_a_branchs_start():
    found = solved(["xa", "ab", "xc", "cd"], {"x": 0.5}, devices=3, target=2)
    assert found in ({"xa", "b", "cd"}, {"xc", "d", "ab"})


def test_small_branches_share_a_device():
    """3 | 2 1 | 1 and the join, or 3 | 2 | 1 1 and the join: 3 devices force sharing."""
    found = solved(["ax", "bx", "cx", "dx"], {"a": 3, "b": 2, "c": 1, "d": 1, "x": 0}, devices=3, target=3)
    assert found is not None
    assert len(found) == 3


def test_the_shallowest_layout_within_the_target_wins():
    """Eight branches of 4: with 9 devices every branch is one stage, and the depth is 2."""
    model = CostModel(towers(8, 4), Cluster(devices=9), 1024)
    layout = tree_search(model, [1], 16).solve(math.inf)
    assert layout is not None
    assert len(layout) == 1
    layout = tree_search(model, [1], 16).solve(model.bottleneck(layout) / 7)
    assert layout is not None
    assert max(model.in_flight(layout)) == 2 * 64
