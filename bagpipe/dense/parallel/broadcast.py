"""Broadcasts that make the model equal on all ranks: from rank 0 before training, per stage from its holder after it.

share_model    rank 0 ──parameters, buffers──> all ranks
share_weights  first holder of each stage ──parameters, buffers──> all ranks
share_stages   the same, and ──layout of the optimizer state, state──> all ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import RankGroup

__all__ = ["HeldStage", "RankBuffers", "share_buffers", "share_model", "share_stages", "share_weights"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldStage:
    """A model stage and the ranks that train it.

    Attributes:
        holders: ranks that train the stage, distinct, in the order of the gradient sum; at least one.
        parameters: its trainable parameters, with their names in the whole model.
        buffers: buffers of its modules.
    """

    holders: tuple[int, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[Tensor, ...] = ()


class RankBuffers(Protocol):
    """Buffers of a model of which every rank has its own values."""

    def share_buffers(self) -> None:
        """Broadcast rank 0's. All ranks call it, between steps."""
        ...


def share_model(model: nn.Module, group: RankGroup) -> None:
    """Broadcast the parameters and buffers of a group's first rank.

    Raises:
        PeerError: a peer is gone or silent.
    """
    for parameter in model.parameters():
        group.broadcast(parameter)
    share_buffers(model, group)


def share_buffers(model: nn.Module, group: RankGroup) -> None:
    """Broadcast the buffers of a group's first rank.

    Raises:
        PeerError: a peer is gone or silent.
    """
    for buffer in model.buffers():
        group.broadcast(buffer)


def share_weights(stages: Sequence[HeldStage], group: RankGroup) -> None:
    """Broadcast every stage's parameters and buffers from its first holder.

    Args:
        stages: all stages of the model.
        group: all ranks of the job.

    Raises:
        PeerError: a peer is gone or silent.
    """
    for stage in stages:
        for tensor in (*(parameter for _, parameter in stage.parameters), *stage.buffers):
            group.broadcast(tensor, stage.holders[0])


def share_stages(
    stages: Sequence[HeldStage],
    optimizer: torch.optim.Optimizer,
    group: RankGroup,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Broadcast every stage from its first holder. All ranks call it, between phases.

    Args:
        stages: all stages of the model.
        optimizer: holds all parameters. A parameter's state is replaced by the first holder's: tensors and JSON-able
            values, or none.
        group: all ranks of the job.
        gather: `Peers.gather`.

    Raises:
        PeerError: a peer is gone or silent.
    """
    own = {
        str(number): [_layout(optimizer.state.get(parameter)) for _, parameter in stage.parameters]
        for number, stage in enumerate(stages)
        if stage.holders[0] == group.rank
    }
    layouts = gather(own)
    share_weights(stages, group)
    for number, stage in enumerate(stages):
        root = stage.holders[0]
        for (_, parameter), layout in zip(stage.parameters, layouts[root][str(number)], strict=True):
            _share_state(optimizer, parameter, layout, group, root)


def _layout(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Optimizer state of one parameter as JSON: dtype, shape and device of tensors, other values as they are."""
    if not state:
        return None
    return {
        name: [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type == "cpu"]
        if isinstance(value, Tensor)
        else {"value": value}
        for name, value in state.items()
    }


def _share_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    layout: Mapping[str, Any] | None,
    group: RankGroup,
    root: int,
) -> None:
    """Replace a parameter's optimizer state by that of `root`."""
    before = optimizer.state.pop(parameter, {})
    if layout is None:
        return
    state: dict[str, Any] = {}
    for name, item in layout.items():
        if isinstance(item, dict):
            state[name] = item["value"]
            continue
        dtype, shape, is_on_host = item
        device = torch.device("cpu") if is_on_host else parameter.device
        is_root = group.rank == root
        state[name] = before[name] if is_root else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        group.broadcast(state[name], root)
    optimizer.state[parameter] = state
