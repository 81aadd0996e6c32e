"""The dense optimizer of a pipeline: that of the user, without the embedding weights; its settings in checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from bagpipe.errors import InputError

__all__ = ["dense_optimizer", "group_settings", "set_groups"]


def dense_optimizer(
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module, dropped: Collection[int]
) -> Optimizer:
    """The optimizer of a model's dense parameters.

    Args:
        optimizer: the user's, made before the collections were replaced, or a function that makes it.
        model: the model, its collections replaced.
        dropped: ``id`` of the parameters that were replaced: embedding weights.

    Raises:
        InputError: the optimizer has a parameter that the model has not, or none that it has.
    """
    if not isinstance(optimizer, Optimizer):
        made = optimizer(model.parameters())
        if not isinstance(made, Optimizer):
            raise InputError(
                f"optimizer must be a torch.optim.Optimizer or a function that makes one, got {type(made).__name__}"
            )
        return made
    held = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in dropped]
        strangers = [parameter for parameter in group["params"] if id(parameter) not in held]
        if strangers:
            raise InputError(
                f"the optimizer has a parameter of shape {list(strangers[0].shape)} that the model has not: dense "
                "parameters on the meta device are made anew, so give a function that makes the optimizer, such as "
                "lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
            )
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    return optimizer


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the settings of every parameter group: learning rate, betas, …"""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set what `group_settings` gave, as `Optimizer.load_state_dict` does.

    Raises:
        InputError: the number of groups differs.
    """
    if len(settings) != len(optimizer.param_groups):
        raise InputError(
            f"expected the {len(settings)} parameter groups of the checkpoint, the dense optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(copy.deepcopy(dict(values)))
