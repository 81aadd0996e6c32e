"""K-FAC of a whole model: which layers a rank owns, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.dense.precondition.kfac import KfacSettings
from bagpipe.errors import InputError
from bagpipe.testing.local_peers import local_peers
from bagpipe.training import whole_kfac as module
from bagpipe.training.whole_kfac import whole_kfac

CPU = torch.device("cpu")


def test_ranks_deal_the_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
    alone = whole_kfac(model, KfacSettings(), CPU)
    assert (alone.owned, alone.is_shared) == ((0, 1, 2), False)
    kfacs = [whole_kfac(model, KfacSettings(), CPU, peer.dense) for peer in local_peers(2)]
    assert [(kfac.owned, kfac.is_shared) for kfac in kfacs] == [((0, 2), True), ((1,), True)]


def test_models_without_layers_and_factors_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"needs a model with trainable torch\.nn\.Linear layers, got none"):
        whole_kfac(nn.LayerNorm(3), KfacSettings(), CPU)
    monkeypatch.setattr(module, "free_memory_bytes", lambda: 100)
    with pytest.raises(
        InputError, match=r"of 1 layers need 300 bytes on cpu, 100 are free; the largest layer is 0 with 300"
    ):
        whole_kfac(nn.Sequential(nn.Linear(3, 3)), KfacSettings(), CPU)
