"""`PlainDLRM` computes the same results as torchrec's DLRM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bagpipe.models.plain_dlrm import PlainDLRM


class FixedBags(nn.Module):
    """Bags that return their input ``[n, F, D]``."""

    def forward(self, sparse: Tensor) -> Tensor:
        return sparse.flatten(1)


def test_it_equals_torchrecs_dlrm() -> None:
    pytest.importorskip("torchrec", reason="compared with torchrec's")
    from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch

    torch.manual_seed(1)
    model = PlainDLRM(FixedBags(), num_dense=3, num_features=4, dim=8, bottom_mlp=(16,), top_mlp=(12, 6)).double()
    bottom = DenseArch(3, [16, 8]).double()
    interaction = InteractionArch(4)
    top = OverArch(8 + 10, [12, 6, 1]).double()
    theirs = [*bottom.parameters(), *top.parameters()]
    for own, other in zip(model.parameters(), theirs, strict=True):
        other.data.copy_(own.data)
    dense, sparse = torch.rand(5, 3).double(), torch.rand(5, 4, 8).double()
    hidden = bottom(dense)
    torch.testing.assert_close(model(dense, sparse), top(interaction(hidden, sparse)))
