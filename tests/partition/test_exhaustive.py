from __future__ import annotations

import pytest

from bagpipe.partition.cost import Cluster, CostModel, Placed
from tests.partition.exhaustive import best_of_all, orderings
from tests.partition.graphs import graph


@pytest.mark.parametrize(("size", "bell"), [(1, 1), (3, 5), (6, 203), (8, 4140)])
def test_without_edges_every_partition_counts(size: int, bell: int):
    assert sum(1 for _ in orderings(graph([], alone="abcdefgh"[:size]))) == bell


def test_a_chain_is_cut_anywhere():
    assert sum(1 for _ in orderings(graph(["ab", "bc", "cd", "de"]))) == 2**4


def test_cyclic_partitions_are_invalid():
    """a -> b and c -> d: of the 15 partitions, {a, d}, {b, c} is impossible, although each stage is convex."""
    found = {frozenset(masks) for masks in orderings(graph(["ab", "cd"]))}
    assert frozenset({0b1001, 0b0110}) not in found
    assert len(found) == 14


def test_a_known_best():
    model = CostModel(graph(["ac", "bc"], {"a": 3, "b": 2, "c": 1}), Cluster(devices=2), 8)
    best = best_of_all(model, [1], [4])
    assert best is not None
    assert best[0] == pytest.approx(3.0)
    assert {stage.mask for stage in best[1]} == {0b001, 0b110}


def test_replicas_are_tried():
    model = CostModel(graph(["ab"], {"a": 3, "b": 1}), Cluster(devices=4), 8)
    best = best_of_all(model, [1, 2, 3, 4], [4])
    assert best is not None
    assert best[0] == pytest.approx(1.0)


def test_nothing_fits():
    model = CostModel(graph(["ab"], param_bytes=9), Cluster(devices=2, memory_bytes=8), 8)
    assert best_of_all(model, [1], [4]) is None


def test_depth_counts_against_memory():
    """If a -> b -> c are separate, a holds 3 micro-batches of 4 bytes; a and b together hold 2 of 8; so a | bc."""
    model = CostModel(graph(["ab", "bc"], activation_bytes=1), Cluster(devices=3, memory_bytes=11), 16)
    best = best_of_all(model, [1], [4])
    assert best is not None
    assert [stage.mask for stage in best[1]] == [0b001, 0b110]


def test_large_graphs_are_refused():
    with pytest.raises(ValueError, match="at most 8 operators, got 9"):
        best_of_all(CostModel(graph([], alone="abcdefghi"), Cluster(devices=1), 1), [1], [1])


def test_the_layout_is_in_order():
    model = CostModel(graph(["ca", "ab"]), Cluster(devices=3), 4)
    best = best_of_all(model, [1], [4])
    assert best is not None
    assert best[1] == (Placed(0b100, 1, 4), Placed(0b001, 1, 4), Placed(0b010, 1, 4))
