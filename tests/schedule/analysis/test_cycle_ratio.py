from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.schedule.analysis.cycle_ratio import GraphEdge, greatest_ratio
from bagpipe.schedule.analysis.cycles import positive_cycle
from bagpipe.schedule.ir.loop import LoopDependency

SIZE = 6


@st.composite
def graphs(draw: st.DrawFn) -> list[GraphEdge]:
    """Edges without turns lead to a node of a higher number, so every cycle has a turn."""
    edges = []
    for _ in range(draw(st.integers(1, 14))):
        src, dst = draw(st.integers(0, SIZE - 1)), draw(st.integers(0, SIZE - 1))
        turns = draw(st.integers(0 if src < dst else 1, 6) | st.just(5_000))
        delay = draw(st.none() | st.integers(0, 3).map(lambda each: np.array([float(each)])))
        edges.append(GraphEdge(src=src, dst=dst, turns=turns, delay=delay))
    return edges


def has_better(edges: list[GraphEdge], costs: list[int], ratio: Fraction) -> bool:
    """Whether a cycle has a greater ratio, by exact numbers."""
    delays = [0 if edge.delay is None else int(edge.delay[0]) for edge in edges]
    weights = [costs[edge.dst] + delay - edge.turns * ratio for edge, delay in zip(edges, delays, strict=True)]
    same = [LoopDependency(src=edge.src, dst=edge.dst, turns=edge.turns, edge=None) for edge in edges]
    return bool(positive_cycle(same, weights, SIZE))


@given(graphs(), st.lists(st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE), min_size=1, max_size=4))
def test_no_cycle_is_better_and_one_is_as_good(edges: list[GraphEdge], costs: list[list[int]]) -> None:
    found = greatest_ratio(edges, np.array(costs, np.float64).T)
    for point, own in enumerate(costs):
        ratio = Fraction(float(found.ratio[point]))
        assert not has_better(edges, own, ratio + Fraction(1, 10**9))
        if ratio:
            assert has_better(edges, own, ratio * Fraction(10**9 - 1, 10**9))


@given(graphs(), st.lists(st.integers(0, 9), min_size=SIZE, max_size=SIZE))
def test_the_cycle_has_its_ratio(edges: list[GraphEdge], costs: list[int]) -> None:
    """Without delays its cost is that of its nodes."""
    plain = [GraphEdge(src=edge.src, dst=edge.dst, turns=edge.turns) for edge in edges]
    found = greatest_ratio(plain, np.array([costs], np.float64).T)
    if found.turns[0]:
        assert found.ratio[0] * found.turns[0] == pytest.approx(np.array(costs)[found.nodes[:, 0]].sum())
    else:
        assert not found.nodes.any()
        assert found.ratio[0] == 0


@given(graphs(), st.lists(st.lists(st.floats(0, 9), min_size=SIZE, max_size=SIZE), min_size=2, max_size=5))
def test_a_point_has_the_same_result_alone(edges: list[GraphEdge], costs: list[list[float]]) -> None:
    together = greatest_ratio(edges, np.array(costs).T)
    alone = [greatest_ratio(edges, np.array([own]).T) for own in costs]
    assert together.ratio.tolist() == [each.ratio[0] for each in alone]
    assert together.nodes.T.tolist() == [each.nodes[:, 0].tolist() for each in alone]
