from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagpipe.dense.chunks.state import state_names
from bagpipe.dense.lamb import Lamb
from bagpipe.errors import InputError

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "lamb": lambda parameters: Lamb(parameters, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_are_those_of_the_state_after_a_step(name: str) -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    optimizer = OPTIMIZERS[name]([parameter])
    parameter.grad = torch.ones(2, 3)
    optimizer.step()
    state = optimizer.state[parameter]
    by_element = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == (2, 3)}
    assert by_element == set(state_names(optimizer))


def test_other_optimizers_are_refused() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(2, 3))])
    with pytest.raises(InputError, match=r"state by element \(SGD, .*, got Adafactor"):
        state_names(optimizer)
