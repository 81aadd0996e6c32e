"""The dense optimizer of a pipeline: that of the user, without the embedding weights; its settings in checkpoints."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bagpipe.checkpoint.optimizer_state import optimizers_in, stepping
from bagpipe.errors import InputError
from bagpipe.train_pipeline.optimizer_rest import check_optimizer, groups_of

__all__ = ["dense_optimizer", "group_settings", "set_groups"]

#: Modules whose steps divide by the `eps` of a group, if it has one.
_KNOWN_STEPS = ("torch.optim.", "torchrec.optim.", "bagpipe.")
#: Optimizer -> dtype of its step, whatever its parameters have.
_COMPUTES: Mapping[type[Optimizer], torch.dtype] = {torch.optim.Muon: torch.bfloat16}


def dense_optimizer(
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer], model: nn.Module, dropped: Collection[int]
) -> Optimizer:
    """The optimizer of a model's dense parameters.

    Args:
        optimizer: the user's, made before the collections were replaced, or a function that makes it.
        model: the model, its collections replaced.
        dropped: ``id`` of the parameters that were replaced: embedding weights.

    Raises:
        InputError: the optimizer has a parameter that the model has not, or its steps or its state need what a
            pipeline does not give.
    """
    if not isinstance(optimizer, Optimizer):
        made = optimizer(model.parameters())
        if not isinstance(made, Optimizer):
            raise InputError(
                f"optimizer must be a torch.optim.Optimizer or a function that makes one, got {type(made).__name__}"
            )
        check_optimizer(made)
        _check_divisors(made, ())
        _take_hooks(made)
        return made
    check_optimizer(optimizer)
    known = {*dropped, *(id(parameter) for parameter in model.parameters())}
    groups = [group for each in optimizers_in(optimizer) for group in each.param_groups]
    strangers = [parameter for group in groups for parameter in group["params"] if id(parameter) not in known]
    if strangers:
        raise InputError(
            f"the optimizer has a parameter of shape {list(strangers[0].shape)} that the model has not: give that of "
            "this model, or a function that makes it, such as lambda parameters: torch.optim.Adam(parameters, lr=1e-3)"
        )
    states = (item for each in optimizers_in(optimizer) for item in each.state.items())
    kept = (state for parameter, state in states if id(parameter) not in dropped and isinstance(state, Mapping))
    named = (item for state in kept for item in state.items())
    name = next((name for name, value in named if isinstance(value, Tensor) and value.is_meta), None)
    if name is not None:
        raise InputError(
            f"the optimizer has state {name!r} on the meta device, from before the parameters had values: "
            "give a function that makes it, such as lambda parameters: torch.optim.Adagrad(parameters)"
        )
    _check_divisors(optimizer, dropped)
    _leave_out(optimizer, dropped)
    _take_hooks(optimizer)
    return optimizer


def _check_divisors(optimizer: Optimizer, dropped: Collection[int]) -> None:
    """Raise InputError if a known step divides by an epsilon that is 0 in a parameter's dtype: 0 / 0 without gradient.

    A fused step computes in float32 where parameters are of a half type.
    """
    for each in stepping(optimizer):
        for group in each.param_groups if type(each).step.__module__.startswith(_KNOWN_STEPS) else ():
            eps = group.get("eps")
            # Adafactor has two, and squares the first.
            eps, power = (eps[0], 2) if isinstance(eps, (list, tuple)) else (eps, 1)
            if eps is None:
                continue
            # Adagrad adds the root of a sum that begins with this.
            number = max(float(eps) ** power, group.get("initial_accumulator_value", 0.0))
            own = (parameter.dtype for parameter in group["params"] if id(parameter) not in dropped)
            widened = (torch.promote_types(dtype, torch.float32) if group.get("fused") else dtype for dtype in own)
            dtypes = {_COMPUTES.get(type(each), dtype) for dtype in widened}
            for dtype in dtypes:
                if not torch.tensor(number, dtype=dtype) > 0:
                    raise InputError(
                        f"{type(each).__name__} has eps {eps}, which is 0 in {str(dtype).removeprefix('torch.')}: "
                        "expected more, as its step of a gradient of 0 would be 0 / 0"
                    )


def _take_hooks(optimizer: Optimizer) -> None:
    """Let an optimizer that was made without torch's constructor, as torchrec's wrappers are, take hooks."""
    for each in optimizers_in(optimizer):
        for call, when in itertools.product(("step", "state_dict", "load_state_dict"), ("pre", "post")):
            vars(each).setdefault(f"_optimizer_{call}_{when}_hooks", OrderedDict())


def _leave_out(optimizer: Optimizer, dropped: Collection[int]) -> None:
    """Take parameters out of an optimizer: of its groups, which stay, of its state, and of attributes that list them.

    Such are torchrec's `KeyedOptimizer.params`, and the lists of its GradientClippingOptimizer.
    """
    replaced: dict[int, Any] = {}  # optimizers share containers
    for each in optimizers_in(optimizer):
        for group in each.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in dropped]
        for key in [key for key in each.state if id(key) in dropped]:
            del each.state[key]
        for name, value in vars(each).items():
            if id(value) not in replaced:
                replaced[id(value)] = _without(value, dropped)
            setattr(each, name, replaced[id(value)])


def _without(value: Any, dropped: Collection[int]) -> Any:
    """A list or dictionary without some values, or itself; dictionaries of lists too."""
    if isinstance(value, list) and any(id(item) in dropped for item in value):
        return [item for item in value if id(item) not in dropped]
    if isinstance(value, dict):
        made = {key: _without(item, dropped) for key, item in value.items() if id(item) not in dropped}
        if len(made) < len(value) or any(made[key] is not value[key] for key in made):
            other = copy.copy(value)
            other.clear()
            other.update(made)
            return other
    return value


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of the settings of every parameter group: learning rate, betas, …"""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in groups_of(optimizer)
    ]


def set_groups(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Set what `group_settings` gave, as `Optimizer.load_state_dict` does.

    Raises:
        InputError: the number of groups differs.
    """
    groups = groups_of(optimizer)
    if len(settings) != len(groups):  # older versions dropped the groups of embedding weights
        groups = [group for group in groups if group["params"]]
    if len(settings) != len(groups):
        raise InputError(
            f"expected the {len(settings)} parameter groups of the checkpoint, the dense optimizer has {len(groups)}"
        )
    for group, values in zip(groups, settings, strict=True):
        group.update(copy.deepcopy(dict(values)))
