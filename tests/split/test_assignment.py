from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.split import assignment as assign
from bagpipe.split.assignment import chain_stages, covers, estimate_cost, stages_of_nodes
from bagpipe.split.operators import ModelParts
from bagpipe.split.split import trace_parts
from tests.split.whole_models import NUM_DENSE, library_model


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    return trace_parts(library_model("towers"), num_dense=NUM_DENSE, dtype=torch.float64)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    crossing=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    num_stages=st.integers(1, 8),
)
def test_a_chain_is_optimal(costs: list[int], crossing: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    crossing[0] = 0  # no operators precede the first

    def value(starts: tuple[int, ...]) -> tuple[int, int]:
        ends = (*starts, len(costs))
        return max(sum(costs[a:b]) for a, b in pairwise(ends)), sum(crossing[start] for start in starts)

    every = [(0, *cuts) for cuts in combinations(range(1, len(costs)), num_stages - 1)]
    found = tuple(assign._cut([float(cost) for cost in costs], crossing, num_stages))
    assert found in every
    assert value(found) == min(map(value, every))


def test_the_longest_name_decides_and_unnamed_operators_follow_their_inputs(parts: ModelParts) -> None:
    stages = {"branches": 0, "branches.6": 1, "top": 2, "top._mlp.1": 3}
    chosen = {parts.traced.paths[node]: stage for node, stage in stages_of_nodes(parts, stages).items()}
    assert chosen["branches.5._mlp.0._linear"] == 0
    assert chosen["branches.6._mlp.0._linear"] == 1
    assert (chosen["top._mlp.0._linear"], chosen["top._mlp.1._linear"], chosen["head"]) == (2, 3, 3)
    join = next(item for item in parts.operators if len(item.inputs) == 7)
    assert chosen[join.name] == 1  # the last of its inputs
    first = parts.operators[0]
    assert first.inputs == ()
    assert chosen[first.name] == 0  # without inputs from the dense part: with its user


def test_paths_are_covered_step_by_step() -> None:
    assert covers("a.b", "a.b.c")
    assert covers("a.b", "a.b")
    assert not covers("a.b", "a.bc")


def test_chain_stages_are_consecutive_and_balanced(parts: ModelParts) -> None:
    names = chain_stages(parts, 4)
    assert list(names) == [item.name for item in parts.operators]
    assert list(names.values()) == sorted(names.values())
    costs = [estimate_cost(parts, item) for item in parts.operators]
    loads = [sum(c for c, s in zip(costs, names.values(), strict=True) if s == stage) for stage in range(4)]
    assert max(loads) <= sum(costs) / 4 + max(costs)
    assert estimate_cost(parts, parts.operators[1]) > 2 * 8 * 3  # at least the weights of the layer
