from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.partition.cost import CostModel
from bagpipe.partition.planner import Problem, found
from bagpipe.partition.planners import PLANNERS
from tests.partition.exhaustive import best_of_all
from tests.partition.graphs import models, valid


@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=40)
@given(model=models(7, has_memory=False), replicas=st.sampled_from([(1,), (1, 2, 3, 4, 5)]))
def test_layouts_are_valid_and_none_beats_the_best_of_all(name: str, model: CostModel, replicas: tuple[int, ...]):
    best = best_of_all(model, replicas, (4,))
    result = PLANNERS[name](Problem(model=model, replicas=replicas, microbatches=(4,)))
    assert result is not None
    assert best is not None
    assert result.best in result.layouts
    assert all(valid(model, layout) for layout in result.layouts)
    assert result.bottleneck_s >= best[0] * (1 - 1e-9)
    if result.exact:
        assert result.bottleneck_s == pytest.approx(best[0], rel=1e-9)


@pytest.mark.slow
@settings(max_examples=2000)
@given(model=models(8, has_memory=False), replicas=st.sampled_from([(1,), (1, 2, 4)]))
def test_two_thousand_graphs(model: CostModel, replicas: tuple[int, ...]):
    """Exact searches find the least bottleneck of all partitions, the others none below it."""
    best = best_of_all(model, replicas, (4,))
    assert best is not None
    for planner in PLANNERS.values():
        result = planner(Problem(model=model, replicas=replicas, microbatches=(4,)))
        assert result is not None
        assert result.bottleneck_s >= best[0] * (1 - 1e-9)
        if result.exact:
            assert result.bottleneck_s == pytest.approx(best[0], rel=1e-9)


@settings(max_examples=40)
@given(model=models(7, chains=True), replicas=st.sampled_from([(1,), (1, 2, 3, 4, 5)]))
def test_on_a_chain_graphpipe_is_the_chain_program(model: CostModel, replicas: tuple[int, ...]):
    problem = Problem(model=model, replicas=replicas, microbatches=(4,))
    graph, chain = PLANNERS["graphpipe"](problem), PLANNERS["pipedream"](problem)
    if not model.graph.is_chain:
        return
    assert (graph is None) == (chain is None)
    if graph is not None and chain is not None:
        assert graph.bottleneck_s == pytest.approx(chain.bottleneck_s, rel=1e-9)


def test_no_layout_is_nothing_found():
    assert found(CostModel.__new__(CostModel), []) is None
