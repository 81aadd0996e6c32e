"""`unchanged_on_error`: a model and its optimizer are as before if a pipeline is refused while it takes them.

modules' classes, attributes and tensors, parameter groups, optimizer state, random state ──> kept
body of the block raises ──> all of them put back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from bagpipe.checkpoint.dense_state import random_state, restore_random_state
from bagpipe.checkpoint.optimizer_state import optimizers_in
from bagpipe.embedding.materialise import place

__all__ = ["unchanged_on_error"]


@contextmanager
def unchanged_on_error(model: nn.Module, optimizer: object, device: torch.device) -> Iterator[None]:
    """Put a model, its optimizer and the random state back if the block raises.

    Objects stay the same: whoever has the model, a parameter or the optimizer goes on with it.

    Args:
        model: of the user.
        optimizer: of its parameters; anything else has nothing to put back.
        device: whose random state is kept, beside that of the host.
    """
    undo = [_of_module(module) for module in model.modules()]
    undo += [_of_data(parameter) for parameter in model.parameters()]
    undo += [_of_optimizer(each) for each in optimizers_in(optimizer)] if isinstance(optimizer, Optimizer) else []
    random = random_state(device)
    try:
        yield
    except BaseException:
        for put_back in undo:
            put_back()
        restore_random_state(random, device)
        raise


def _of_module(module: nn.Module) -> Callable[[], None]:
    kind, attributes = type(module), dict(vars(module))
    contents = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}

    def put_back() -> None:
        module.__class__ = kind
        vars(module).clear()
        vars(module).update(attributes)
        for name, content in contents.items():
            attributes[name].clear()
            attributes[name].update(content)

    return put_back


def _of_data(parameter: nn.Parameter) -> Callable[[], None]:
    """The storage and gradient of a parameter, which `nn.Module.to` replaces."""
    data, gradient = parameter.data, parameter.grad

    def put_back() -> None:
        if parameter.is_meta != data.is_meta:
            place(parameter, data)
        parameter.data, parameter.grad = data, gradient

    return put_back


def _of_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    attributes = dict(vars(optimizer))
    state = attributes.get("state", {})
    contents: list[tuple[Any, Any]] = [(state, dict(state))]
    for group in attributes.get("param_groups", ()):
        contents.append((group, {**group, "params": list(group["params"])}))

    def put_back() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for held, content in contents:
            held.clear()
            held.update(content)
        if "param_groups" in attributes:
            attributes["param_groups"][:] = [group for group, _ in contents[1:]]

    return put_back
