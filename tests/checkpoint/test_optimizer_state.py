"""State of an optimizer cut to what a rank steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Adam

from bagpipe.checkpoint.optimizer_state import cut, restore_optimizer
from bagpipe.dense.parallel.shard_layout import Piece


def test_state_of_the_parameters_shape_is_cut() -> None:
    piece, part = Piece(first=2, shape=(2, 3)), nn.Parameter(torch.zeros(3))
    assert cut("exp_avg", torch.arange(6.0).view(2, 3), piece, part).tolist() == [2.0, 3.0, 4.0]
    assert cut("step", torch.tensor(7.0), piece, part).item() == 7.0
    assert cut("momentum_buffer", None, piece, part) is None


@pytest.mark.parametrize("length", [0, 1])
def test_a_scalar_parameter_has_a_count_of_steps_on_every_rank(length: int) -> None:
    piece, part = Piece(first=0, shape=()), nn.Parameter(torch.ones(length))
    optimizer = Adam([part])
    states = {"step": torch.tensor(7.0), "exp_avg": torch.tensor(0.5), "exp_avg_sq": torch.tensor(0.25)}
    own = {"scale": {state: cut(state, value, piece, part) for state, value in states.items()}}
    restore_optimizer(own, {"scale": part}, optimizer)
    part.grad = torch.ones(length)
    optimizer.step()
    state = optimizer.state[part]
    assert state["step"].shape == ()
    assert state["step"].item() == 8.0
    assert state["exp_avg"].tolist() == pytest.approx([0.55] * length)
