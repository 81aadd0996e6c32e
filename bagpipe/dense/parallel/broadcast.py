"""Equal models on all ranks: before training rank 0's parameters to all, after it every stage's from who trained it.

share_model    rank 0 ──parameters, buffers──> all ranks
share_stages   first holder of each stage ──what its optimizer's state looks like, parameters, buffers, state──> all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.distributed.interface import RankGroup

__all__ = ["HeldStage", "share_model", "share_stages"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldStage:
    """A stage of a model, on whatever rank.

    Attributes:
        holders: ranks that train it, each once, in the order in which their gradients are summed; at least one.
        parameters: its trainable parameters, with their names in the whole model.
        buffers: of its modules.
    """

    holders: tuple[int, ...]
    parameters: tuple[tuple[str, nn.Parameter], ...]
    buffers: tuple[Tensor, ...] = ()


def share_model(model: nn.Module, group: RankGroup) -> None:
    """Give all ranks of a group the first one's parameters and buffers.

    Raises:
        PeerError: a peer is gone or silent.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        group.broadcast(tensor)


def share_stages(
    stages: Sequence[HeldStage],
    optimizer: torch.optim.Optimizer,
    group: RankGroup,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Give all ranks every stage as its first holder has it; by all ranks alike, between phases.

    Args:
        stages: all of the model's.
        optimizer: of all parameters. Its state of a parameter becomes that of the first holder: tensors and JSON-able
            values, or none; what a rank had before is dropped.
        group: all ranks of the job.
        gather: `Peers.gather`.

    Raises:
        PeerError: a peer is gone or silent.
    """
    mine = {
        str(number): [_outline(optimizer.state.get(parameter)) for _, parameter in stage.parameters]
        for number, stage in enumerate(stages)
        if stage.holders[0] == group.rank
    }
    told = gather(mine)
    for number, stage in enumerate(stages):
        root = stage.holders[0]
        for tensor in (*(parameter for _, parameter in stage.parameters), *stage.buffers):
            group.broadcast(tensor, root)
        for (_, parameter), outline in zip(stage.parameters, told[root][str(number)], strict=True):
            _share_state(optimizer, parameter, outline, group, root)


def _outline(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An optimizer's state of one parameter without the tensors' elements; JSON-able."""
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
    outline: Mapping[str, Any] | None,
    group: RankGroup,
    root: int,
) -> None:
    """Make the state of a parameter what `root` has."""
    before = optimizer.state.pop(parameter, {})
    if outline is None:
        return
    state: dict[str, Any] = {}
    for name, described in outline.items():
        if isinstance(described, dict):
            state[name] = described["value"]
            continue
        dtype, shape, is_on_host = described
        device = torch.device("cpu") if is_on_host else parameter.device
        is_ours = group.rank == root
        state[name] = before[name] if is_ours else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        group.broadcast(state[name], root)
    optimizer.state[parameter] = state
