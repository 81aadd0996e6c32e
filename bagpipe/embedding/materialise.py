"""Allocates and initialises the parameters of a model that was built on the meta device.

Parameters stay the same objects, so those that modules share stay shared, and optimizers made before have them.
Children are reset before their parents, as in construction: a parent's `reset_parameters` can overwrite values of a
child. Values come from torch's global generator, which the caller seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bagpipe.errors import InputError

__all__ = ["materialise", "place"]


def materialise(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Allocate and reset the meta tensors of `model`, then move it to `device`, floating-point tensors in `dtype`.

    Values are drawn in the dtype of the model, so a float64 job starts from the values of a float32 job. Without a
    `dtype` (None) all tensors keep theirs.

    Raises:
        InputError: a module holds meta tensors and has no `reset_parameters`.
    """
    for name, module in _children_first("", model):
        held = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        meta = sorted(key for key, tensor in held.items() if tensor.is_meta)
        plain = sorted(key for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta)
        if not meta and not plain:
            continue
        reset = _reset_of(module)
        where = f"module {name!r}" if name else "the model itself"
        if plain or reset is None:
            raise InputError(
                f"{where} ({type(module).__name__}) holds {', '.join(meta + plain)} on the meta device and "
                "cannot be given values: expected parameters with a reset_parameters() method, "
                "or build that part on a real device"
            )
        _allocate(module, device)
        reset()
    model.to(device=device, dtype=dtype)


def place(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data on another device than it has, the meta device included; it stays the same object.

    Hooks of its gradient are lost.
    """
    other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, other)  # torch.utils.swap_tensors refuses weak references, such as LSTM's


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Allocate the meta tensors of a module alone."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_meta:
            place(parameter, torch.empty_like(parameter, device=device))
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=device)


def _children_first(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        yield from _children_first(f"{name}.{key}" if name else key, child)
    yield name, module


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The initialiser of a module; in torch's attention and transformer it is `_reset_parameters`."""
    for attribute in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, attribute, None)
        if callable(reset):
            return reset  # type: ignore[no-any-return]
    return None
