"""`Preconditioning`: the factors of this rank's layers, in checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagpipe.dense.precondition.kfac import Kfac, KfacSettings
from bagpipe.dense.precondition.layers import linear_layers
from bagpipe.errors import InputError
from bagpipe.training.preconditioning import Preconditioning


def part_of(model: nn.Module) -> Preconditioning:
    return Preconditioning({"1": Kfac(linear_layers(model), KfacSettings())}, dict(model.named_parameters()))


def test_chunks_without_layers_keep_nothing() -> None:
    part = part_of(nn.Sequential(nn.Linear(2, 1)))
    assert not part.is_divided
    assert part.tensors("0", 4) == {}
    assert part.tensors("1", 4).keys() == {"0.next_turn"}


def test_a_checkpoint_of_other_weights_begins_anew_and_one_of_other_layers_is_refused() -> None:
    part = part_of(nn.Sequential(nn.Linear(2, 1)))
    part.load_tensors({})
    with pytest.raises(InputError, match="no K-FAC factors of layer 0"):
        part.load_tensors({"other.next_turn": torch.tensor(3)})
