"""`call_with_leaves`: compiled code called with leaves in the places of a module's stored weights.

    stored weights ──detach──> leaves ──code──> outputs ──detach──> outputs       the backward is that of the code; its
           ^──────────gradients──┘                                                gradients of leaves are passed on

Stored weights (`in_place_of`) have a gradient to pass on, so they are no leaves; parameters are. torch compiles for a
kind of input, so both come to the code as parameters: one compilation serves all versions of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

__all__ = ["call_with_leaves"]

_Code = Callable[..., tuple[Tensor, ...]]


class _Place(NamedTuple):
    """Where a module has a stored weight."""

    owner: nn.Module
    key: str
    weight: Tensor


def call_with_leaves(code: _Code, module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a module's code.

    Args:
        code: of the module's forward; reads the module's weights.
        module: the module. A backward of a call with stored weights runs once.
        inputs: of the forward.
    """
    places = [
        _Place(owner, key, weight)
        for owner in module.modules()
        for key, weight in owner._parameters.items()
        if weight is not None and not weight.is_leaf
    ]
    if not places:
        return code(*inputs)
    weights = {id(place.weight): place.weight for place in places}  # a weight in two places is one leaf
    outputs: tuple[Tensor, ...]
    outputs = _LeafCall.apply(code, places, len(weights), *weights.values(), *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _LeafCall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, code: _Code, places: Sequence[_Place], num_weights: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        leaves = {id(weight): nn.Parameter(weight.detach()) for weight in tensors[:num_weights]}
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in tensors[num_weights:]]
        try:
            for place in places:
                place.owner._parameters[place.key] = leaves[id(place.weight)]
            with torch.enable_grad():
                outputs = code(*inputs)
        finally:
            for place in places:
                place.owner._parameters[place.key] = place.weight  # type: ignore[assignment]
        ctx.outputs, ctx.inputs = outputs, [*leaves.values(), *inputs]
        ctx.set_materialize_grads(False)
        given = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(*(one for one, own in zip(given, outputs, strict=True) if not own.requires_grad))
        return given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [
            (output, gradient)
            for output, gradient in zip(ctx.outputs, gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        wanted = {number: each for number, each in enumerate(ctx.inputs) if each.requires_grad}
        found = torch.autograd.grad(
            [output for output, _ in pairs], [*wanted.values()], [gradient for _, gradient in pairs], allow_unused=True
        )
        given = dict(zip(wanted, found, strict=True))
        return (None, None, None, *(given.get(number) for number in range(len(ctx.inputs))))
