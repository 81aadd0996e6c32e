"""State of torch's optimizers, by parameter name: compared with a checkpoint's, cut to what a rank steps, and restored.

saved states ──cut──> of a rank's segments ──compare_states──> fits? ──restore_optimizer──> optimizer.state
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.dense.parallel.shard_layout import Piece
from bagpipe.errors import InputError

__all__ = ["compare_states", "cut", "restore_optimizer", "type_name"]

#: State of torch's optimizers that is one number for all elements.
_STEPS = "step"


def type_name(tensor: Tensor) -> str:
    """Dtype and shape, as in ``float32 [3, 4]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def cut(state: str, value: Any, piece: Piece, part: Tensor) -> Any:
    """What belongs to a run of elements, of optimizer state that has the parameter's shape; else all of it."""
    # A count of steps has the shape of a parameter that is a scalar.
    if state == _STEPS or not isinstance(value, Tensor) or tuple(value.shape) != piece.shape:
        return value
    return value.reshape(-1)[piece.first : piece.first + part.numel()]


def _parameters_of(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, Any]]:
    """(name, parameter, parameter group) of an optimizer's parameters."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in parameters.items():
        if parameter in groups:
            yield name, parameter, groups[parameter]


def compare_states(
    states: Mapping[str, Mapping[str, Any]], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Raise InputError unless the checkpoint has the state that a new optimizer has; the rest appears at step one."""
    for name, parameter, _ in _parameters_of(parameters, optimizer):
        saved = states.get(name, {})
        for state, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
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
    for name, parameter, group in _parameters_of(parameters, optimizer):
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
        optimizer.state[parameter] = kept
