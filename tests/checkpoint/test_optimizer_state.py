"""State of an optimizer cut to what a rank steps."""

from __future__ import annotations

import torch
from torch import nn

from bagpipe.checkpoint.optimizer_state import cut
from bagpipe.dense.parallel.shard_layout import Piece


def test_state_of_the_parameters_shape_is_cut() -> None:
    piece, part = Piece(first=2, shape=(2, 3)), nn.Parameter(torch.zeros(3))
    assert cut(torch.arange(6.0).view(2, 3), piece, part).tolist() == [2.0, 3.0, 4.0]
    assert cut(torch.tensor(7.0), piece, part).item() == 7.0
    assert cut(None, piece, part) is None
