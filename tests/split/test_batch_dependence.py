from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bagpipe.split.batch_dependence import batch_dependent_operators
from bagpipe.split.split import split
from tests.split.whole_models import MODEL_NAMES, NUM_DENSE, library_model


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_library_models_keep_examples_apart(name: str) -> None:
    staged = split(library_model(name), stages=2, num_dense=NUM_DENSE, dtype=torch.float64)
    assert batch_dependent_operators(staged) == ()


class Mixing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, dense: Tensor, sparse: object) -> Tensor:
        hidden = functional.dropout(self.first(dense), 0.5, self.training)
        if self.how == "mean":
            hidden = hidden - hidden.mean(0)
        if self.how == "softmax":
            hidden = functional.softmax(hidden, dim=0)
        if self.how == "size":
            hidden = hidden / len(dense)
        if self.how == "undefined":
            hidden = (-hidden.square()).log()  # NaN for every example, independent of the others
        if self.how == "noise":
            hidden = hidden + torch.zeros_like(hidden).uniform_()
        logits: Tensor = self.last(hidden)
        return logits


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("mean", ("first: mean",)),
        ("softmax", ("first: softmax",)),
        ("size", ("first: truediv",)),
        ("undefined", ()),
        ("noise", ()),
        ("", ()),
    ],
)
def test_operators_that_mix_examples_are_found(how: str, found: tuple[str, ...]) -> None:
    staged = split(Mixing(how), stages={"first": 0, "last": 1}, num_dense=3, dtype=torch.float32)
    state = torch.random.get_rng_state()
    assert batch_dependent_operators(staged) == found
    assert staged.model.training
    assert torch.equal(torch.random.get_rng_state(), state)
