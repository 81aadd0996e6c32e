"""State that optimizers keep for each element of a parameter, by name: it lies in chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from bagpipe.dense.lamb import Lamb
from bagpipe.errors import InputError

__all__ = ["state_names"]

_Group = Mapping[str, Any]


def _moments(group: _Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))


#: Optimizer -> names of the tensors that have their parameter's shape, for settings of a group.
_STATES: Mapping[type[Optimizer], Callable[[_Group], tuple[str, ...]]] = {
    torch.optim.SGD: lambda group: ("momentum_buffer",) if group["momentum"] else (),
    torch.optim.Adagrad: lambda group: ("sum",),
    torch.optim.Adam: _moments,
    torch.optim.AdamW: _moments,
    Lamb: _moments,
}


def state_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Names of the optimizer's state that has an element for each of the parameter's.

    Raises:
        InputError: it is not known to keep its state by elements.
    """
    kind = type(optimizer)
    if kind not in _STATES:
        known = ", ".join(each.__name__ for each in _STATES)
        raise InputError(
            f"chunks of the dense part need an optimizer with state by element ({known}), got {kind.__name__}"
        )
    return tuple(dict.fromkeys(name for group in optimizer.param_groups for name in _STATES[kind](group)))
