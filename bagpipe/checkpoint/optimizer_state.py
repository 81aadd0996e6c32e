"""State of torch's optimizers, by parameter name: compared with a checkpoint's, cut to what a rank steps, and restored.

saved states ──cut──> of a rank's segments ──compare_states──> fits? ──restore_optimizer──> optimizer.state

An optimizer can wrap others, as torchrec's do: the state is that of the innermost ones (`stepping`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.errors import InputError, JobError

__all__ = [
    "check_finite",
    "compare_states",
    "cut",
    "has_plain_name",
    "new_optimizer",
    "optimizers_in",
    "restore_optimizer",
    "state_of",
    "stepping",
    "type_name",
]

#: State of torch's optimizers that is one number for all elements.
_STEPS = "step"


def type_name(tensor: Tensor) -> str:
    """Dtype and shape, as in ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_finite(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise JobError if a parameter that steps have changed has a NaN or an infinity; name, parameter. Waits for it."""
    for name, parameter in parameters:
        # A sum of finite numbers can overflow.
        if not bool(parameter.detach().sum().isfinite()) and not bool(parameter.detach().isfinite().all()):
            raise JobError(
                f"a step of the dense optimizer made {name} not finite; it is not saved. Lower the learning rate"
            )


def optimizers_in(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """An optimizer and those that it wraps, in its attributes or in containers there; each before what it wraps."""
    found: dict[int, torch.optim.Optimizer] = {}

    def add(value: object) -> None:
        if isinstance(value, torch.optim.Optimizer):
            if id(value) not in found:
                found[id(value)] = value
                add(list(vars(value).values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        elif type(value) is dict:
            add(list(value.values()))

    add(optimizer)
    return list(found.values())


def stepping(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that step parameters: those inside an optimizer that wrap no other, or itself."""
    return [each for each in optimizers_in(optimizer) if len(optimizers_in(each)) == 1]


def has_plain_name(state: object, value: object) -> bool:
    """Whether an entry of a parameter's state is a tensor or a JSON scalar, by a name that a file can have."""
    is_plain = isinstance(value, Tensor) or value is None or isinstance(value, bool | int | float | str)
    return is_plain and isinstance(state, str) and "." not in state


def state_of(
    optimizers: Iterable[torch.optim.Optimizer], model: nn.Module, only: Collection[str] | None, *, keeps_rest: bool
) -> Iterator[tuple[str, Any]]:
    """``name.state`` and value of all entries of the state of a model's parameters.

    Args:
        optimizers: each parameter is in one of them.
        model: has the parameters.
        only: names of those wanted; None: all.
        keeps_rest: leave out what has no plain name, which is kept elsewhere.

    Raises:
        InputError: an entry has no plain name.
    """
    holders = [holder for optimizer in optimizers for holder in stepping(optimizer)]
    for name, parameter in model.named_parameters():
        if only is not None and name not in only:
            continue
        for holder in holders:
            for state, value in holder.state.get(parameter, {}).items():
                if has_plain_name(state, value):
                    yield f"{name}.{state}", value
                elif not keeps_rest:
                    raise InputError(f"optimizer state {state!r} of {name!r} is a {type(value).__name__}, not a tensor")


def cut(state: str, value: Any, piece: Piece, part: Tensor) -> Any:
    """What belongs to a run of elements, of optimizer state that has the parameter's shape; else all of it."""
    # A count of steps has the shape of a parameter that is a scalar.
    if state == _STEPS or not isinstance(value, Tensor) or tuple(value.shape) != piece.shape:
        return value
    return value.reshape(-1)[piece.first : piece.first + part.numel()]


def _parameters_of(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, Any, Any]]:
    """(name, parameter, parameter group, state of all parameters) of an optimizer's parameters."""
    groups = {
        parameter: (group, holder.state)
        for holder in stepping(optimizer)
        for group in holder.param_groups
        for parameter in group["params"]
    }
    for name, parameter in parameters.items():
        if parameter in groups:
            yield name, parameter, *groups[parameter]


def new_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has made no step, or, if it steps segments of the parameters, one of whole parameters."""
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not optimizer.state or stepped.issuperset(trainable):
        return optimizer
    return type(optimizer)(trainable, **optimizer.defaults)  # elementwise: its state is a function of its defaults


def compare_states(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Raise InputError unless the checkpoint has the state that a new optimizer has; the rest appears at step one."""
    for name, parameter, _, held in _parameters_of(parameters, optimizer):
        saved = states.get(name, {})
        for state, value in held.get(parameter, {}).items():
            if not isinstance(value, Tensor) or not has_plain_name(state, value):
                continue
            found = saved.get(state)
            if not isinstance(found, Tensor) or type_name(found) != type_name(value):
                title = type_name(found) if isinstance(found, Tensor) else "missing"
                raise InputError(
                    f"the checkpoint is of another optimizer: state {state!r} of {name!r} is {title} there, "
                    f"{type_name(value)} in this job"
                )


def restore_optimizer(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Give an optimizer's parameters the saved state."""
    for name, parameter, group, held in _parameters_of(parameters, optimizer):
        if name not in states:
            continue
        kept: dict[str, Any] = {}
        for state, value in states[name].items():
            if isinstance(value, Tensor):
                # torch keeps step counts on the host, unless a fused or captured kernel reads them.
                on_host = state == _STEPS and not (group.get("fused") or group.get("capturable"))
                kept[state] = value.clone() if on_host else value.to(parameter.device, copy=True)
            else:
                kept[state] = value
        held[parameter] = kept
