"""`traced_call`: a call of a linear layer inside compiled code, shown to whoever watches the layer.

    forward    inputs, output ──bagpipe::linear_call──> a copy of the output, number of the call      watch.called
    backward   gradient of the copy, number ──bagpipe::linear_gradient──> a copy of the gradient         watch.reached

torch traces a model once and calls no hook later. These operators are part of the code, and call the watch each time.
Compiled code uses its memory again, so a watch copies what it keeps. A module's number is in the code.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn

__all__ = ["Watch", "traced_call", "watch_layer"]


class Watch(Protocol):
    """Sees the calls of layers."""

    def called(self, module: int, inputs: Tensor) -> int:
        """A layer is called.

        Args:
            module: number of its module.
            inputs: ``[..., num_inputs]``; the code writes over them later.

        Returns:
            A number of the call; negative: the backward is not of interest.
        """
        ...

    def reached(self, call: int, gradient: Tensor) -> None:
        """A backward reaches a call.

        Args:
            call: number of the call.
            gradient: of its output, ``[..., num_outputs]``; the code writes over it later.
        """
        ...


#: Attribute of a module: torch compares it at every call, so that a module does not get the code of another one.
_NUMBER = "watched_number"

_numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
_next = count()
_watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()


def watch_layer(module: nn.Module, watch: Watch) -> int:
    """Have a watch see the calls of a module's compiled code, and no other watch.

    Returns:
        The number of the module, the same each time.
    """
    number = _numbers.setdefault(module, next(_next))
    setattr(module, _NUMBER, number)
    _watches[number] = watch
    return number


def traced_call(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """The output of a layer, whose call its watch sees whenever the traced code runs.

    Args:
        module: of the layer; watched.
        inputs: of the layer.
        output: of the layer.
    """
    seen: Tensor = torch.ops.bagpipe.linear_call(inputs, output, getattr(module, _NUMBER))[0]
    return seen


@torch.library.custom_op(
    "bagpipe::linear_call", mutates_args=(), schema="(Tensor inputs, Tensor output, int module) -> (Tensor, Tensor)"
)
def _linear_call(inputs: Tensor, output: Tensor, module: int) -> tuple[Tensor, Tensor]:
    watch = _watches.get(module)
    number = -1 if watch is None else watch.called(module, inputs)
    return output.clone(), torch.tensor(number)


@torch.library.custom_op(
    "bagpipe::linear_gradient", mutates_args=(), schema="(Tensor gradient, Tensor call, int module) -> Tensor"
)
def _linear_gradient(gradient: Tensor, call: Tensor, module: int) -> Tensor:
    watch, number = _watches.get(module), int(call)
    if watch is not None and number >= 0:
        watch.reached(number, gradient)
    return gradient.clone()


@_linear_call.register_fake
def _(inputs: Tensor, output: Tensor, module: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty((), dtype=torch.int64)


@_linear_gradient.register_fake
def _(gradient: Tensor, call: Tensor, module: int) -> Tensor:
    return torch.empty_like(gradient)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.module = inputs[2]
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (call,) = ctx.saved_tensors
    return None, torch.ops.bagpipe.linear_gradient(gradient, call, ctx.module), None


_linear_call.register_autograd(_backward, setup_context=_keep)
