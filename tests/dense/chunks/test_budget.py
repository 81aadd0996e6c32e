from __future__ import annotations

import pytest
from torch import nn
from torch.optim import Adam

from bagpipe.dense.chunks.budget import Budget, ChunkPlan, Piece, divide_budget, plan_chunks
from bagpipe.errors import InputError


def plan(*widths: int, budget: Budget) -> ChunkPlan:
    """A lane with a layer of each width, each a piece."""
    layers = [nn.Linear(width, width, bias=False) for width in widths]
    return plan_chunks([Piece.of(layer, Adam(layer.parameters())) for layer in layers], budget)


def test_no_chunk_is_in_two_pieces() -> None:
    found = plan(8, 8, 8, budget=Budget(chunk_bytes=1024))
    assert [*map(list, found.chunks)] == [[0], [1], [2]]
    assert found.least_bytes == 4 * 1024


def test_every_lane_gets_its_least_and_a_share_of_the_rest() -> None:
    budget = Budget(num_bytes=12 * 1024, chunk_bytes=1024)
    plans = [plan(16, budget=budget), plan(16, 16, 16, budget=budget)]
    assert [each.least_bytes for each in plans] == [4096, 4096]
    found = divide_budget(budget, plans)
    assert found == [4096, 8192], "the first lane can use no more"
    assert sum(found) <= budget.num_bytes
    assert divide_budget(Budget(num_bytes=1 << 30), plans) == [4096, 3 * 4096]


def test_a_budget_below_the_least_of_all_lanes_is_refused() -> None:
    budget = Budget(num_bytes=8191, chunk_bytes=1024)
    with pytest.raises(InputError, match=r"at least 8192, .* 2 compute lanes of a rank need \(4096, 4096\), got 8191"):
        divide_budget(budget, [plan(16, budget=budget), plan(16, budget=budget)])
