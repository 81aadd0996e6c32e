"""`versioned_call`: a module called with other weights than its own, whose backward can read yet other ones.

    parameter ──stored weights──> module ──> outputs       a derivative that needs weights reads those of the backward
        ^──gradient────────────────────┘

Gradients reach the parameters, as if the module had been called with them. Activations are those of the call. Autograd
calls the innermost hooks of saved tensors alone, so the ones around the call, which can move activations, are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from bagpipe.errors import InputError

__all__ = ["CallWeights", "SavedHooks", "in_place_of", "versioned_call"]


class SavedHooks(Protocol):
    """Hooks of `torch.autograd.graph.saved_tensors_hooks`."""

    def pack(self, tensor: Tensor) -> Any:
        """What the graph keeps of a tensor; no tuple."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallWeights:
    """The weights of one call of a module: tensors like its trainable parameters, in their order.

    Attributes:
        parameters: the trainable parameters.
        forward: the weights of the call; None: the parameters.
        backward: the weights of its backward, as they are then; None: the parameters.
    """

    parameters: Sequence[Tensor]
    forward: Sequence[Tensor] | None = None
    backward: Sequence[Tensor] | None = None


def versioned_call(
    module: nn.Module,
    arguments: tuple[Any, ...],
    weights: CallWeights,
    *,
    buffers: Mapping[str, Tensor] = MappingProxyType({}),
    around: SavedHooks | None = None,
) -> Any:
    """The module's outputs.

    Args:
        module: the module.
        arguments: its arguments.
        weights: of the call and its backward.
        buffers: replace those of the module.
        around: hooks of saved tensors around the call; None: there are none.

    Raises:
        InputError: forward and backward have different weights, and two parameters share memory.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    given = dict(buffers)
    parameters, forward, backward = weights.parameters, weights.forward, weights.backward
    if forward is not None:
        for parameter, stored in zip(parameters, forward, strict=True):
            given[names[id(parameter)]] = in_place_of(parameter, stored)
    context: AbstractContextManager[object] = nullcontext()
    if forward is not backward:
        context = saved_tensors_hooks(
            *_exchange(
                [names[id(parameter)] for parameter in parameters],
                parameters if forward is None else forward,
                parameters if backward is None else backward,
                around,
            )
        )
    with context:
        return functional_call(module, given, arguments) if given else module(*arguments)


def in_place_of(parameter: Tensor, stored: Tensor) -> Tensor:
    """Stored weights for a forward, in the place of a parameter, which gets their gradient.

    Args:
        parameter: trainable.
        stored: of its shape and dtype.
    """
    weights: Tensor = _Stored.apply(parameter, stored)  # type: ignore[no-untyped-call]
    return weights


class _Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, stored: Tensor) -> Tensor:
        return stored.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _exchange(
    names: Sequence[str], forward: Sequence[Tensor], backward: Sequence[Tensor], around: SavedHooks | None
) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Hooks that keep views of weights of the forward by position, and read them from those of the backward."""
    places: dict[int, list[tuple[int, int, int]]] = {}  # storage -> first element, end and position of each tensor
    for position, tensor in enumerate(forward):
        if not tensor.numel():
            continue
        first = int(tensor.storage_offset())
        end: int = (
            first + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        )
        others = places.setdefault(tensor.untyped_storage().data_ptr(), [])
        for begin, stop, other in others:
            if first < stop and begin < end:
                raise InputError(
                    f"expected trainable parameters in memory of their own, got two that share memory: {names[other]} "
                    f"and {names[position]}; backwards with other weights than their forwards cannot tell them apart"
                )
        others.append((first, end, position))

    def pack(tensor: Tensor) -> Any:
        offset = tensor.storage_offset()
        found = places.get(tensor.untyped_storage().data_ptr(), ()) if tensor.numel() else ()
        for first, end, position in found:
            if first <= offset < end:
                # A parameter can begin inside its memory; the weights of the backward are elsewhere in theirs.
                return position, tensor.shape, tensor.stride(), offset - first
        return tensor if around is None else around.pack(tensor)

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, tuple):
            return cast(Tensor, packed) if around is None else around.unpack(packed)
        position, shape, stride, offset = packed
        weights, layout = backward[position].detach(), forward[position].stride()
        if weights.stride() != layout:
            weights = torch.empty_strided(weights.shape, layout, dtype=weights.dtype, device=weights.device).copy_(
                weights
            )
        view: Tensor = weights.as_strided(shape, stride, weights.storage_offset() + offset)
        return view

    return pack, unpack
